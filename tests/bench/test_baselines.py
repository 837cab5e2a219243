"""The baseline is MeZO's step, and leaves no trace but the update."""

import copy

import torch

import keyhole
from keyhole.bench.baselines import Textbook
from keyhole.bench.shapes import opt_config


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
