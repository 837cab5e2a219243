"""A second run whose linear layers offer their gradients computes the same, with the last product left out or not."""

import pytest
import torch
from torch import nn

from keyhole.model.backward.recompute import Recompute


class Block(nn.Module):
    """Ends with a residual, as most blocks do. saves: an operation after the last product saves its output."""

    def __init__(self, saves: bool = False, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.saves, self.twice = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), saves, twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2 if self.twice else 1):
            x = x + self.down(self.up(x).tanh())
        return x.sigmoid() if self.saves else x


def grads(block: Block, run: "Recompute | None", accepts: bool) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """Gradients of parameters and input, those that were accepted included; and whether each offer was alone."""
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    names, offered, found = {id(p): name for name, p in block.named_parameters()}, [], {}

    def receive(weight: nn.Parameter, dy_MO: torch.Tensor, x_MI: torch.Tensor, used_once: bool) -> bool:
        offered.append(used_once)
        if accepts:
            found[names[id(weight)]] = found.get(names[id(weight)], 0) + dy_MO.t() @ x_MI
        return accepts

    y = block(x) if run is None else run.run(lambda: block(x), receive)
    torch.autograd.backward(y, torch.linspace(0, 1, 12).view(3, 4))
    found |= {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
    block.zero_grad(set_to_none=True)
    return found | {"x": x.grad}, offered


@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_gradients_are_those_of_an_ordinary_run(accepts: bool, saves: bool, twice: bool) -> None:
    """In the first reverse and in later ones, which leave a product out where that is possible; a weight that is used
    twice is said to be."""
    block = Block(saves, twice)
    expected, _ = grads(block, None, accepts)
    recompute = Recompute(block)
    for _ in range(3):
        found, offered = grads(block, recompute, accepts)
        assert found.keys() == expected.keys() and offered == [not twice] * (4 if twice else 2)
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad)
    assert recompute.last_product[True] == (None if saves else 3 if twice else 1)
    assert "forward" not in block.up.__dict__


def test_a_product_that_is_needed_after_all_is_made() -> None:
    """A block that changes what it saves is run once more with nothing left out."""
    block = Block()
    recompute = Recompute(block)
    grads(block, recompute, True)
    block.saves = True
    found, _ = grads(block, recompute, True)
    expected, _ = grads(block, None, True)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad)
    assert recompute.last_product[True] is None
