"""The textbook loop that `zo` is compared with: its step on one vector is MeZO's, parameter by parameter."""

import torch

import keyhole
from benchmarks.textbook_learning import Losses, candidates_loss, flattened, mezo_step
from tests.model.candidates import candidate_batch, plain_candidates_loss
from tests.model.decoders import config


def module() -> torch.nn.Module:
    return keyhole.load(config("llama"), init="random", device="cpu").module.eval()


@torch.no_grad()
def test_a_step_on_views_of_one_vector_is_the_step_on_every_parameter() -> None:
    """Three steps on other batches, with the same z: weights to rounding, which differs as updates are grouped."""
    one, other, eps, lr = module(), module(), 1e-2, 1e-2
    before = flattened(one).clone()
    w, losses = flattened(one), Losses(one, torch.device("cpu"))
    params = list(other.parameters())
    for t in range(3):
        batch = candidate_batch([2, 3, 2], seed=t)
        z = torch.randn(w.shape, generator=torch.Generator().manual_seed(t))
        mezo_step(w, z, losses.of(batch), lr, eps)
        parts = [part.view(p.shape) for part, p in zip(z.split([p.numel() for p in params]), params, strict=True)]
        found = []
        for scale in (eps, -2 * eps):
            for p, part in zip(params, parts, strict=True):
                p.data.add_(part, alpha=scale)
            found.append(plain_candidates_loss(other, [batch]))
        for p, part in zip(params, parts, strict=True):
            p.data.add_(part, alpha=eps - lr * float(found[0] - found[1]) / (2 * eps))
    after = torch.cat([p.detach().flatten() for p in params])
    moved = (after - before).norm()
    assert float((w - after).norm()) < 1e-3 * float(moved)
    assert float(moved) > 0


@torch.no_grad()
def test_right_padding_needs_no_mask_of_its_own() -> None:
    """The loss without one is that with it: a causal model never reads what follows a trained position."""
    own, batch = module(), candidate_batch([2, 4], seed=5)
    assert bool((batch["attention_mask"] == 0).any())
    torch.testing.assert_close(candidates_loss(own, batch), plain_candidates_loss(own, [batch]), rtol=1e-6, atol=1e-6)
