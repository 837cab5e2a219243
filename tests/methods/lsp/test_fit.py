"""Fitting projectors: bias by definition, learning that holds on unseen gradients, moments that move along."""

import pytest
import torch

from keyhole.methods.lsp.fit import Gradient, bias, compressed, fit, fit_blocks, gram, transfer_moments
from keyhole.ops.lsp.projector import KINDS, Projector, random_projector

M, N, TOKENS = 48, 64, 128


def batches(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """dY and X of the first layer of a small network on fresh batches: inputs of few directions, a fixed task."""
    fixed, fresh = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    mix = torch.randn(16, N, generator=fixed) * torch.linspace(1, 0.1, 16)[:, None]
    w_MN, head_M = torch.randn(M, N, generator=fixed) / N**0.5, torch.randn(M, generator=fixed) / M**0.5
    pairs = []
    for _ in range(count):
        x = torch.randn(TOKENS, 16, generator=fresh) @ mix + 0.1 * torch.randn(TOKENS, N, generator=fresh)
        y = (x @ w_MN.T).requires_grad_()
        ((torch.tanh(y) @ head_M - torch.sin(x[:, 0])) ** 2).mean().backward()
        pairs.append((y.grad, x))
    return pairs


def full(grad: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return grad[0].T @ grad[1]


def mean_bias(grads: list[Gradient], p: Projector, q: Projector) -> float:
    return torch.stack([bias(grad, p, q) for grad in grads]).mean().item()


def projectors(kind: str, d: int = 32, r: int = 4, seed: int = 1) -> tuple[Projector, Projector]:
    return random_projector(kind, M, d, r, seed=seed), random_projector(kind, N, d, r, seed=seed + 1)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_bias_is_its_definition(kind: str) -> None:
    """From G or from its factors: ||P P^T G Q Q^T - G|| / ||G||; S is P^T G Q."""
    grad, (p, q) = batches(1, 0)[0], projectors(kind)
    P, Q, G = p.dense_Rd(), q.dense_Rd(), full(grad)
    expected = (P @ P.T @ G @ Q @ Q.T - G).norm() / G.norm()
    torch.testing.assert_close(bias(G, p, q), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(bias(grad, p, q), expected, rtol=1e-3, atol=0)
    for given in (grad, G):
        torch.testing.assert_close(compressed(given, p, q), P.T @ G @ Q, rtol=1e-4, atol=1e-5 * G.norm().item())


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("factors", [True, False])
def test_learned_beats_random_on_unseen_gradients(kind: str, factors: bool) -> None:
    """Fitted on some batches, the bias falls far on others; positions stay, the gradients are not touched."""
    calibration, unseen = batches(3, 1), [full(grad) for grad in batches(3, 2)]
    given = calibration if factors else [full(grad) for grad in calibration]
    start = projectors(kind)
    p, q = fit(given, *start)
    assert mean_bias(unseen, p, q) < 0.7 * min(1.0, mean_bias(unseen, *start))
    assert torch.equal(p.columns_Rr(), start[0].columns_Rr()) and not p.values_Rr.requires_grad
    assert all(torch.equal(a[1], b[1]) for a, b in zip(calibration, batches(3, 1), strict=True))


def test_blocks_fit_is_orthonormal_and_the_best_of_many() -> None:
    """The closed form keeps P^T P = I, agrees between G and its factors, and beats random bases."""
    calibration = batches(2, 1)
    p, q = fit_blocks(calibration, *projectors("blocks"))
    torch.testing.assert_close(p.dense_Rd().T @ p.dense_Rd(), torch.eye(p.d), rtol=0, atol=1e-5)
    grads = [full(grad) for grad in calibration]
    best = mean_bias(grads, p, q)
    assert best == pytest.approx(mean_bias(grads, *fit_blocks(grads, *projectors("blocks"))), abs=1e-3)
    assert all(best < mean_bias(grads, *projectors("blocks", seed=s)) for s in range(20))


def test_blocks_with_a_short_last_block() -> None:
    """Rows that do not fill the last block are fitted too; columns they cannot span are zero."""
    p, q = random_projector("blocks", 45, 16, 4, seed=1), random_projector("blocks", 61, 16, 4, seed=2)
    grads = [full(grad)[:45, :61] for grad in batches(2, 1)]
    p, q = fit(grads, p, q)
    for each in (p, q):
        gram = each.dense_Rd().T @ each.dense_Rd()
        assert (gram - gram.diagonal().round().diag()).abs().max() < 1e-5
    assert mean_bias(grads, p, q) < 0.9


def test_fit_stops_when_good_enough() -> None:
    """With alpha above what the start has, nothing is learned."""
    start = projectors("free")
    fitted = fit(batches(1, 1), *start, alpha=100.0)
    assert all(torch.equal(new.values_Rr, old.values_Rr) for new, old in zip(fitted, start, strict=True))


def test_first_moment_moves_exactly_within_what_was_seen() -> None:
    """For a gradient that lies in the old subspace, its new coordinates are those of the gradient itself."""
    (old_p, old_q), (new_p, new_q) = projectors("blocks", d=16), projectors("free", d=20, seed=7)
    G = old_p.dense_Rd() @ torch.randn(old_p.d, old_q.d) @ old_q.dense_Rd().T
    m, v = transfer_moments(compressed(G, old_p, old_q), torch.rand(old_p.d, old_q.d), (old_p, old_q), (new_p, new_q))
    torch.testing.assert_close(m, compressed(G, new_p, new_q), rtol=1e-3, atol=1e-3 * m.abs().max().item())
    assert v.shape == m.shape and (v >= 0).all()


def test_second_moment_is_exact_for_uncorrelated_entries() -> None:
    """v' is the second moment of what m' is made of, when the entries of S are independent."""
    old, new = projectors("blocks", d=16), projectors("blocks", d=16, seed=5)
    x_p, x_q = gram(old[0], new[0]), gram(old[1], new[1])
    v = torch.rand(old[0].d, old[1].d)
    draws = torch.randn(20_000, *v.shape, generator=torch.Generator().manual_seed(0)) * v.sqrt()
    measured = (x_p @ draws @ x_q.T).square().mean(0)
    torch.testing.assert_close(transfer_moments(v, v, old, new)[1], measured, rtol=0.15, atol=1e-3)
