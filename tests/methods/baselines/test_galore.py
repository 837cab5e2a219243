"""GaLore: the published rule by hand, plain AdamW where there is nothing to project, and exact resume."""

import pytest
import torch

import keyhole
from keyhole.methods.baselines.galore import GaLore, project, project_back, projector
from tests.model.decoders import WIDTH, batch, config


def load(name: str = "llama") -> keyhole.Model:
    return keyhole.load(config(name), init="random", device="cpu")


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (3, 9, 8)])
def test_the_projector_keeps_the_strongest_directions(shape: tuple[int, ...]) -> None:
    """Columns are orthonormal, full rank loses nothing, and rank r loses what the best rank-r matrix loses."""
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    full = projector(grad, min(shape[-2:]))
    torch.testing.assert_close(project_back(project(grad, full), full, grad.shape), grad, rtol=1e-4, atol=1e-5)
    p = projector(grad, 3)
    torch.testing.assert_close(p.mT @ p, torch.eye(3).expand(*shape[:-2], 3, 3), rtol=1e-4, atol=1e-5)
    lost = (grad - project_back(project(grad, p), p, grad.shape)).square().sum(dim=(-2, -1))
    best = torch.linalg.svdvals(grad)[..., 3:].square().sum(dim=-1)
    torch.testing.assert_close(lost, best, rtol=1e-3, atol=1e-5)


def test_a_matrix_follows_the_published_rule() -> None:
    """Four steps with a switch of the subspace equal the rule written out for one matrix."""
    model = load()
    method = GaLore(model, lr=1e-2, rank=4, update_proj_gap=2, scale=0.5, weight_decay=0.1)
    name = method.projected[0]
    weight, moments = method.params[name].data.clone(), [0.0, 0.0]
    seen = []
    method.params[name].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for t in range(4):
        method.step(batch(seed=t))
        grad = seen[-1]
        if t % 2 == 0:
            vh = torch.linalg.svd(grad)[2]
            p = vh[:4].T
        low = grad @ p
        moments = [0.9 * moments[0] + 0.1 * low, 0.999 * moments[1] + 0.001 * low**2]
        normed = moments[0] / (1 - 0.9 ** (t + 1)) / ((moments[1] / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8)
        weight = weight - 1e-2 * (0.5 * normed @ p.T + 0.1 * weight)
        torch.testing.assert_close(method.params[name].data, weight, rtol=1e-4, atol=1e-5)


def test_without_projection_it_is_adamw() -> None:
    """A rank that no matrix exceeds by its shorter side leaves plain AdamW."""
    ours, theirs = load(), load()
    galore = GaLore(ours, lr=1e-2, rank=WIDTH, weight_decay=0.1, max_grad_norm=0.5)
    adamw = keyhole.AdamW(theirs, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    assert galore.projected == []
    for t in range(4):
        galore.step(batch(seed=t))
        adamw.step(batch(seed=t))
    for (_, a), (_, b) in zip(ours.named_tensors(), theirs.named_tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_state_is_smaller_than_adams_and_the_loss_falls() -> None:
    """What GaLore is for: less state, and it still learns."""
    model = load()
    method = GaLore(model, lr=1e-2, rank=4, update_proj_gap=10, scale=1.0)
    losses = [float(method.step(batch())) for _ in range(30)]
    state = method.state_dict()
    inside = [
        name for name in state if name.split("/")[0] in method.projected and isinstance(state[name], torch.Tensor)
    ]
    numel = sum(method.params[name].numel() for name in method.projected)
    assert sum(state[name].numel() for name in inside) < numel and losses[-1] < 0.5 * losses[0]


def test_blocks_run_twice_give_the_same_bits() -> None:
    """activations=block keeps less and changes nothing."""
    models = load(), load()
    for model, activations in zip(models, ("none", "block"), strict=True):
        method = GaLore(model, lr=1e-2, rank=4, activations=activations)
        for t in range(3):
            method.step([batch(seed=t), batch(seed=t + 9)])
    for (_, a), (_, b) in zip(models[0].named_tensors(), models[1].named_tensors(), strict=True):
        assert torch.equal(a, b)
