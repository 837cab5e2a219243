"""The baselines are MeZO's step and torch's loops, tuned or not, and leave no trace but the update."""

import copy

import pytest
import torch

import keyhole
from keyhole.bench.baselines import Native, Textbook, take_weights
from keyhole.bench.shapes import llama_config, opt_config


def tiny() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A tiny OPT as the bench uses it, and a batch."""
    model = keyhole.load(opt_config("1.3B", quick=True), init="random", device="cpu", dtype="float32")
    ids_BT = torch.randint(4, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    return model.module, {"input_ids": ids_BT, "labels": ids_BT}


@torch.no_grad()
def test_a_step_equals_the_definition() -> None:
    """w - lr g z with g from two losses at w + eps z and w - eps z, z drawn once and kept."""
    module, batch = tiny()
    before = copy.deepcopy([p.data for p in module.parameters()])
    method = Textbook(module, 0.01, eps=1e-3, seed=5)
    seed = int(torch.randint(2**31, (), generator=torch.Generator().manual_seed(5)))
    generator = torch.Generator().manual_seed(seed)
    z = [torch.normal(0.0, 1.0, w.shape, generator=generator) for w in before]
    losses = []
    for sign in (1, -1):
        for param, w, noise in zip(module.parameters(), before, z, strict=True):
            param.data.copy_(w + sign * 1e-3 * noise)
        losses.append(float(module(**batch).loss))
    for param, w in zip(module.parameters(), before, strict=True):
        param.data.copy_(w)
    loss = method.step(batch)
    g = (losses[0] - losses[1]) / 2e-3
    assert abs(float(loss) - sum(losses) / 2) < 1e-5
    assert abs(method.projected - g) < 1e-2 * max(1.0, abs(g))
    for param, w, noise in zip(module.parameters(), before, z, strict=True):
        assert torch.allclose(param.data, w - 0.01 * method.projected * noise, atol=1e-6)


def llama() -> keyhole.Model:
    return keyhole.load(llama_config("7B", quick=True), init="random", device="cpu", dtype="float32", seed=3)


@pytest.mark.parametrize(("rule", "hook"), [("SGD", False), ("SGD", True), ("AdaLOMO", True)])
def test_the_tuned_loops_compute_what_the_plain_ones_do(rule: str, hook: bool) -> None:
    """Three compiled steps give the losses and weights of plain SGD, or of our AdaLOMO; no gradient or hook stays."""
    ids_BT = torch.randint(4, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    batch, model, other = {"input_ids": ids_BT, "labels": ids_BT}, llama(), llama()
    tuned = Native(take_weights(model), 0.05, rule, hook=hook, compile="aot_eager")
    plain = keyhole.AdaLOMO(other, 0.05) if rule == "AdaLOMO" else Native(take_weights(other), 0.05, rule)
    losses = [[float(one.step(batch)) for _ in range(3)] for one in (tuned, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][2] < losses[0][0]
    for ours, theirs in zip(model.module.parameters(), other.module.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-4, atol=1e-6)  # sums in another order
        assert ours.grad is None
    assert not any(module._forward_pre_hooks for module in model.module.modules())
    assert all(block._compiled_call_impl for block in model.module.model.layers)


def test_loras_by_peft_train_the_layers_that_ours_trains() -> None:
    model, ours = llama(), keyhole.LoRA(llama(), 1e-3)
    native = Native(take_weights(model), 1e-3, "AdamW", peft=8, fused=True)
    shapes = [sorted(p.shape for p in own) for own in (native.own, ours.model.methods.addon.params.values())]
    assert shapes[0] == shapes[1] and {p.dtype for p in native.own} == {torch.float32}
