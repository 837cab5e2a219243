"""Linear layers as operations that torch.compile does not look into, whose gradients go to a receiver."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from keyhole.model.backward.compiled_linear import linears_offer, offers_go_to

CPU = torch.device("cpu")


def run(layer: nn.Linear, x: torch.Tensor, compiled: bool, receive: object) -> torch.Tensor:
    call = torch.compile(layer, backend="aot_eager") if compiled else layer
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
