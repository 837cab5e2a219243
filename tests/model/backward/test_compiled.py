"""Compiled blocks have the gradients of plain ones, offered or not, and save parameters as themselves."""

import pytest
import torch
from torch import nn

import keyhole
from keyhole.model.backward.activation_store import ActivationStore
from keyhole.model.backward.compiled import Saved
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


@in_every_run(lambda name: name != "qwen2")
@pytest.mark.parametrize("name, count", [("llama", 2), ("qwen2", 1), ("opt", 1)])
def test_gradients_are_those_of_autograd(name: str, count: int) -> None:
    """With one micro-batch linear layers offer their products; with two, gradients are added up by autograd. Streamed
    equals resident to the bit, though a block's parameters lie elsewhere in the reverse."""
    model = load(name)
    sink = collected(model, TWO[:count], compiled=IN_PLACE)
    assert bool(sink.offers) == (count == 1)
    assert_same(sink.found, by_autograd(model, TWO[:count]))
    away = collected(streamed(model, slot_count=2), TWO[:count], compiled=IN_PLACE).found
    assert all(torch.equal(away[key], grad) for key, grad in sink.found.items())


@in_every_run(lambda count: count == 1)
@pytest.mark.parametrize("count", [1, 2])
def test_all_activations_kept(count: int) -> None:
    """Without a second run of blocks the gradients are the same."""
    model = load("llama")
    kept = collected(model, TWO[:count], compiled=IN_PLACE, activations="none")
    assert bool(kept.offers) == (count == 1)
    assert_same(kept.found, by_autograd(model, TWO[:count]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
    saved = Saved(layer, [x], ActivationStore(torch.device("cpu"), to_host=True))
    packed = saved.pack(layer.weight.data)
    assert packed is layer.weight
    layer.weight.data = torch.full((4, 4), 2.0)  # as when a unit comes into another slot
    assert saved.unpack(packed).eq(2).all()
    assert saved.unpack(saved.pack(x)) is x
    assert saved.pack(layer.weight.data[0]) is not layer.weight  # a part of a parameter is not that parameter
