"""Linear layers as operations that torch.compile does not look into, whose gradients go to a receiver."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from keyhole.model.backward.compiled_linear import TELLS, linears_offer, offers_go_to
from tests.traced import IN_PLACE

CPU = torch.device("cpu")


def run(layer: Callable, x: torch.Tensor, compiled: bool, receive: object) -> torch.Tensor:
    call = torch.compile(layer, backend=IN_PLACE) if compiled else layer
    with linears_offer(CPU):
        y = call(x)
        with offers_go_to(receive):
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
    with offers_go_to(lambda w_OI, dy_MO, x_MI: w_OI.add_(1.0)):
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
