"""A linear layer with an adapter by products alone: peft's numbers and autograd's gradients."""

from typing import Any

import pytest
import torch
from torch import nn

from keyhole.methods.lora.adapted_linear import ADAPTER, AdapterRecompute, adapted_forward, use_products

peft = pytest.importorskip("peft")


class Block(nn.Module):
    """Two linear layers and a residual: nothing is saved after the last product."""

    def __init__(self, width: int = 24, wide: int = 40, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, wide, bias=bias), nn.Linear(wide, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def adapted(frozen: bool = True, bias: bool = True) -> Any:
    torch.manual_seed(0)
    block = Block(bias=bias)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["up", "down"])
    model = peft.inject_adapter_in_model(config, nn.ModuleDict({"block": block}))
    for name, param in model.named_parameters():
        param.requires_grad_(not frozen or "lora_" in name)
        if "lora_B" in name:
            nn.init.normal_(param, std=0.3)
    return model["block"]


def gradients(block: Any, x: torch.Tensor, run: Any = None) -> dict[str, torch.Tensor]:
    """Output, and gradients of inputs and of everything that is trained."""
    x = x.clone().requires_grad_()
    y = block(x) if run is None else run(lambda: block(x))
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    found = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
    block.zero_grad()
    return found | {"x": x.grad, "y": y.detach()}


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_peft(frozen: bool, bias: bool) -> None:
    """Output and every gradient, of a frozen layer and of one that learns itself; with dropout under the same seed."""
    block, x = adapted(frozen, bias), torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1))
    for rate in (0.0, 0.5):
        for layer in (block.up, block.down):
            layer.lora_dropout[ADAPTER] = nn.Dropout(rate).train(rate > 0)
        torch.manual_seed(7)
        theirs = gradients(block, x)
        for layer in (block.up, block.down):
            use_products(layer)
        torch.manual_seed(7)
        ours = gradients(block, x)
        assert theirs.keys() == ours.keys()
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
        for layer in (block.up, block.down):
            del layer.forward


def test_the_second_run_leaves_out_what_nobody_uses() -> None:
    """From the second reverse on the last product is not made, and every gradient keeps its bits."""
    block, x = adapted(), torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1))
    for layer in (block.up, block.down):
        use_products(layer)
    whole = gradients(block, x)
    again, calls = AdapterRecompute(block), []
    block.down.base_layer.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        found = gradients(block, x, lambda call: again.run(call, lambda *_: False))
        assert all(torch.equal(found[name], whole[name]) for name in whole if name != "y")
    assert len(calls) == 1 and again.last_product == {True: 1}


def test_without_a_graph_the_same_bits_come_out() -> None:
    """The first run of a block has none."""
    block, x = adapted(), torch.randn(7, 24)
    with torch.no_grad():
        plain = adapted_forward(block.up, x)
    assert torch.equal(plain, adapted_forward(block.up, x).detach())


@pytest.mark.parametrize("frozen", [True, False])
def test_the_output_may_be_written_to(frozen: bool) -> None:
    """By the code after it, as in Falcon's blocks, whose layers are not plain ones."""
    block, x = adapted(frozen), torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1))
    use_products(block.up)
    y, changed = block.up(x), block.up(x)
    changed += 2 * x.mean()
    found, expected = (
        torch.autograd.grad(out.square().sum(), block.up.lora_B[ADAPTER].weight)[0]
        for out in (changed, y + 2 * x.mean())
    )
    assert torch.equal(found, expected)
