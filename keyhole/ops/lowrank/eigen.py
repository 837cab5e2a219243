"""Eigenvalues and eigenvectors of small symmetric matrices, with the same bits on every device: Jacobi's rotations.

    A <- J^T A J        J rotates p and q so that a_pq becomes 0; E <- E J; in the end A = E diag(d) E^T

A round rotates k / 2 disjoint pairs at once, chosen as in a tournament, so that k - 1 rounds cover every pair: a sweep.
Sweeps continue until no off-diagonal element is above TINY of the largest diagonal one; convergence is quadratic, in 6
to 10 sweeps. Everything is elementwise float64 (product, sum, quotient, root, each rounded separately), so the bits
depend on no library and no device. A pair that needs no rotation is left unchanged to the bit, so the result for a
matrix does not depend on the others in its batch.

Bytes per sweep: about 50 k^3 per matrix. Legend: B matrices of k x k.
"""

import numpy as np
import torch

TINY = 2.0**-46
MOST_SWEEPS = 40


def tournament(k: int) -> list[tuple[list[int], list[int]]]:
    """Rounds of k / 2 pairs (p, q), p < q; every pair once."""
    around, rounds = list(range(1, k)), []
    for _ in range(k - 1):
        seats = [0, *around]
        pairs = [sorted((seats[i], seats[k - 1 - i])) for i in range(k // 2)]
        rounds.append(([p for p, _ in pairs], [q for _, q in pairs]))
        around = around[1:] + around[:1]
    return rounds


def root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square roots: PyTorch on a CPU may use a vector library, which is sometimes off by the last
    bit; numpy uses the processor's own instruction."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def _rotation(
    a_p: torch.Tensor, a_q: torch.Tensor, a_pq: torch.Tensor, turns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosine, sine) that make a_pq zero; (1, 0) where `turns` is False."""
    tau = (a_q - a_p) / torch.where(turns, 2.0 * a_pq, torch.ones_like(a_pq))
    tangent = 1.0 / (tau.abs() + root(tau * tau + 1.0))
    tangent = torch.where(tau < 0, -tangent, tangent)
    cosine = 1.0 / root(tangent * tangent + 1.0)
    return torch.where(turns, cosine, 1.0), torch.where(turns, tangent * cosine, 0.0)


def _turn(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
    """Rotates rows p and q of x [B, k, ..]."""
    x_p, x_q, c, s = x[:, p], x[:, q], cosine[:, :, None], sine[:, :, None]
    x[:, p], x[:, q] = c * x_p - s * x_q, s * x_p + c * x_q


def eigen(a_Bkk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(d [B, k], e [B, k, k]): row i of e is the eigenvector of d_i, of norm 1. Not sorted. a: symmetric, float64."""
    count, k, _ = a_Bkk.shape
    even = k + k % 2
    a = a_Bkk.new_zeros(count, even, even)
    a[:, :k, :k] = a_Bkk
    e = torch.eye(even, dtype=a.dtype, device=a.device).repeat(count, 1, 1)
    least = a.diagonal(dim1=1, dim2=2).abs().amax(1, keepdim=True) * TINY
    rounds = [(torch.tensor(p, device=a.device), torch.tensor(q, device=a.device)) for p, q in tournament(even)]
    for _ in range(MOST_SWEEPS):
        turned = torch.zeros((), dtype=torch.bool, device=a.device)
        for p, q in rounds:
            diagonal, a_pq = a.diagonal(dim1=1, dim2=2), a[:, p, q]
            turns = a_pq.abs() > least
            cosine, sine = _rotation(diagonal[:, p], diagonal[:, q], a_pq, turns)
            for x in (a, a.mT, e):
                _turn(x, p, q, cosine, sine)
            turned = turned | turns.any()
        if not turned:
            break
    return a.diagonal(dim1=1, dim2=2)[:, :k].clone(), e[:, :k, :k].clone()
