"""Compiled blocks have the gradients of plain ones, offered or not, and save parameters as themselves."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import keyhole
from keyhole.model.backward.activation_store import ActivationStore
from keyhole.model.backward.block_call import CompiledCall
from keyhole.model.backward.recompute import TELLS, linears_offer
from tests.matrix import in_every_run
from tests.model.backward.gradients import Collect, assert_same, by_autograd, collected, load
from tests.model.decoders import batch, config
from tests.model.streaming import streamed
from tests.traced import IN_PLACE

TWO = [batch(2, 10, seed=1), batch(2, 10, seed=2)]  # of one shape: another would be compiled with symbols for sizes


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    """After a model of other shapes, sizes would be compiled as symbols: seconds."""
    torch._dynamo.reset()


@in_every_run(lambda name, keeps: name != "qwen2" and (name == "llama" or not keeps))
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name, count", [("llama", 1), ("llama", 2), ("qwen2", 1), ("opt", 1)])
def test_gradients_are_those_of_autograd(name: str, count: int, keeps: bool) -> None:
    """With one micro-batch linear layers offer their products; with two, gradients are added up by autograd. Streamed
    equals resident to the bit, though a block's parameters lie elsewhere in the reverse. keeps: no second run."""
    model = load(name)
    sink = collected(model, TWO[:count], compiled=IN_PLACE, activations="none" if keeps else "block")
    assert bool(sink.offers) == (count == 1)
    assert_same(sink.found, by_autograd(model, TWO[:count]))
    if not keeps:
        away = collected(streamed(model, slot_count=2), TWO[:count], compiled=IN_PLACE).found
        assert all(torch.equal(away[key], grad) for key, grad in sink.found.items())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "method, settings", [("LOMO", {}), ("LOMO", {"activations": "none"}), ("LSP", {"d": 8, "r": 2, "learn": False})]
)
def test_blocks_compiled_by_inductor_on_a_gpu(method: str, settings: dict) -> None:
    """The real compiler: weights that blocks change in their reverse are those of plain blocks, within rounding."""
    found = []
    for compiled in (False, True):
        model = keyhole.load(config("llama"), init="random", dtype="float32", device="cuda")
        made = getattr(keyhole, method)(model, 1e-3, compile=compiled, **settings)
        for seed in (1, 2):
            made.step(batch(2, 16, seed=seed))
        made.flush()
        found.append({tensor.name: model.home(tensor).clone() for tensor in model.layout.tensors})
    for name, plain in found[0].items():
        torch.testing.assert_close(found[1][name], plain, rtol=1e-4, atol=1e-4)


def test_a_sink_cannot_decline_what_a_compiled_block_offers() -> None:
    """The weight has no other gradient: it would be lost in silence."""
    with pytest.raises(AssertionError, match="cannot decline"):
        collected(load(), TWO[:1], Collect(accepts=False), compiled=IN_PLACE)


def test_a_parameter_is_saved_as_itself() -> None:
    """It is unpacked from where it is by then; anything else comes back as it was."""
    layer, x = nn.Linear(4, 4), torch.ones(4)
    compiled: Any = None
    saved = CompiledCall(compiled, layer, partial(ActivationStore(torch.device("cpu"), True).put, block=0), (x,), {})
    packed = saved.pack(layer.weight.data)
    assert packed is layer.weight
    layer.weight.data = torch.full((4, 4), 2.0)  # as when a unit comes into another slot
    assert saved.unpack(packed).eq(2).all()
    assert saved.unpack(saved.pack(x)) is x
    assert saved.pack(layer.weight.data[0]) is not layer.weight  # a part of a parameter is not that parameter


# -- linear layers as operations that torch.compile does not look into -------------------------------------------------

CPU = torch.device("cpu")


def run(layer: Callable, x: torch.Tensor, compiled: bool, receive: Any) -> torch.Tensor:
    call = torch.compile(layer, backend=IN_PLACE) if compiled else layer
    with linears_offer(CPU, receive):
        y = call(x)
        y.square().sum().backward()
    return y


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("needs_dx", [False, True])
def test_gradients_are_autograds_and_the_weights_go_to_the_receiver(compiled: bool, bias: bool, needs_dx: bool) -> None:
    """dx and the bias's by autograd, computed before the receiver changes the weight; the weight's by its factors, even
    where nobody needs dx."""
    layer, x = nn.Linear(3, 5, bias=bias), torch.randn(2, 4, 3, requires_grad=needs_dx)
    plain = [t.detach().clone().requires_grad_() for t in (x, layer.weight, *([layer.bias] if bias else []))]
    F.linear(*plain).square().sum().backward()
    offers = []

    def receive(w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> None:
        assert w_OI.data_ptr() == layer.weight.data_ptr()
        offers.append(dy_MO.t() @ x_MI)
        w_OI.zero_()

    run(layer, x, compiled, receive)
    assert len(offers) == 1 and layer.weight.grad is None and layer.weight.abs().max() == 0
    torch.testing.assert_close(offers[0], plain[1].grad)
    if needs_dx:
        torch.testing.assert_close(x.grad, plain[0].grad)
    if bias:
        torch.testing.assert_close(layer.bias.grad, plain[2].grad)


def test_other_layers_stay_as_they_are() -> None:
    """A frozen layer, one of a subclass, and every layer outside of the context offer nothing."""

    class Own(nn.Linear):
        pass

    frozen, own = nn.Linear(3, 3).requires_grad_(False), Own(3, 3)
    before = nn.Linear.forward
    for layer in (frozen, own):
        run(layer, torch.ones(1, 3, requires_grad=True), False, lambda *_: pytest.fail("was offered"))
    assert own.weight.grad is not None and nn.Linear.forward is before


@pytest.mark.skipif(not TELLS, reason="this PyTorch cannot trace such a declaration")
def test_what_the_reverse_changes_is_declared() -> None:
    """torch's own check of the operation, with a receiver that changes the weight."""
    dy, x, w = torch.randn(4, 5), torch.randn(4, 3), torch.randn(5, 3)
    with linears_offer(CPU, lambda w_OI, dy_MO, x_MI: w_OI.add_(1.0)):
        torch.library.opcheck(
            torch.ops.keyhole.linear_reverse.default, (dy, x, w), test_utils=("test_schema", "test_faketensor")
        )
    assert torch.ops.keyhole.linear_reverse.default._schema.arguments[2].is_write


def test_a_weight_changes_after_its_last_reading() -> None:
    """A gated block: the gate's gradient needs a product of the second run, whose weight its own reverse changes."""
    torch.manual_seed(0)
    gated, gate, x = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), torch.randn(2, 3, requires_grad=True)
    plain = [t.detach().clone().requires_grad_() for t in (x, gated.weight, gate.weight)]
    (F.linear(*plain[:2]) * F.linear(plain[0], plain[2]).sigmoid()).square().sum().backward()

    def block(x: torch.Tensor) -> torch.Tensor:
        return gated(x) * gate(x).sigmoid()

    def receive(w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> None:
        w_OI.sub_(dy_MO.t() @ x_MI)

    run(lambda x: checkpoint(block, x, use_reentrant=False), x, True, receive)
    torch.testing.assert_close(x.grad, plain[0].grad)
    for layer, before in ((gated, plain[1]), (gate, plain[2])):
        torch.testing.assert_close(layer.weight, before - before.grad)
