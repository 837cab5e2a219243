"""Fits projectors to gradients, measures how well they fit, and transfers Adam's moments between subspaces.

The estimation bias of P, Q on a gradient G (LSP-Offload, Def. 2) and the objective of the fit (Eq. 3), over calibration
gradients; here each bias is relative, ||b|| / ||G||, so that BETA means the same for every layer:

    b = P P^T G Q Q^T - G            min over P, Q of   mean ||b|| / ||G||  +  BETA (||P|| + ||Q||)

With S = P^T G Q, A = P^T P, B = Q^T Q:   ||b||^2 = tr(S^T A S B) - 2 ||S||^2 + ||G||^2,   so no tensor of G's size is
needed, and G may be given as factors: G = dY^T X, S = (dY P)^T (X Q), ||G||^2 = sum (dY dY^T) * (X X^T).

    free         a few steps of Adam on the r numbers of each row, from the random start; positions stay. A step costs
                 dense products [m, d] by [d, d] and [T, m] by [m, d], forward and backward.
    blocks       P^T P = I, so ||b||^2 = ||G||^2 - ||P^T G Q||^2, and for fixed Q the best P is, block by block, the r
                 leading eigenvectors of the Gram matrix of G Q's rows. Two rounds: P, then Q given P, then both again.
                 On synthetic gradients with structure (96 x 128, d 32 or 64, r 4 to 16) the held-out bias is at most
                 that of 50 steps of the other, and the fit takes a twentieth of the time.

Moments (`transfer_moments`). m is in the coordinates S = P^T G Q. The smallest full-size gradient with those
coordinates is, for orthonormal projectors, P m Q^T; its coordinates in the new subspace are

    m' = X_P m X_Q^T        X_P = P_new^T P,   X_Q = Q_new^T Q
    v' = X_P^2 v (X_Q^2)^T  elementwise squares: never negative

m' is exact for the part of the gradients in the old subspace (the rest was lost, and counts as zero); v' would be exact
if the entries of S were uncorrelated, and is an approximation otherwise. For free projectors, which are not
orthonormal, this is the paper's formula. Both maps are linear, so the step count and Adam's bias correction stay valid.
Legend: m, n sides of the weight; T tokens; d columns and r numbers per row of a projector; g rows of a block.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from keyhole.ops.lsp.compress import compress
from keyhole.ops.lsp.decompress import decompress_add_
from keyhole.ops.lsp.projector import Projector

Gradient = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A weight gradient: [m, n], or its factors dY [T, m] and X [T, n]."""

BATCHED = 32  # CUDA's solver batches symmetric matrices up to this side; larger ones are solved on the CPU
LR = 0.3  # of the fit, relative to the rms of a projector's numbers
BETA = 1e-4  # weight of their norms


def compressed(grad: Gradient, p: Projector, q: Projector) -> torch.Tensor:
    """S = P^T G Q, float32 [d_P, d_Q]."""
    if isinstance(grad, tuple):
        dy_TM, x_TN = grad
        return compress(dy_TM, p, torch.float32).T @ compress(x_TN, q, torch.float32)
    return compress(compress(grad, q, torch.float32).T.contiguous(), p).T.contiguous()


def norm_squared(grad: Gradient) -> torch.Tensor:
    """||G||^2."""
    if isinstance(grad, tuple):
        dy_TM, x_TN = (side.float() for side in grad)
        return ((dy_TM @ dy_TM.T) * (x_TN @ x_TN.T)).sum()
    return grad.float().square().sum()


def gram(p: Projector, other: Projector | None = None) -> torch.Tensor:
    """P_other^T P, float32 [d_other, d]; P^T P by default."""
    return compress((other or p).dense_Rd().T.contiguous(), p)


def bias(grad: Gradient, p: Projector, q: Projector) -> torch.Tensor:
    """||P P^T G Q Q^T - G|| / ||G||, a scalar on the device: 0 is perfect, 1 is as bad as no update at all.

    For factors, by the trace formula: accurate to about 1e-3.
    """
    s_dd = compressed(grad, p, q)
    if isinstance(grad, tuple):
        s = s_dd.double()
        inside = (gram(p).double() @ s @ gram(q).double() * s).sum()
        total = norm_squared(grad).double()
        return ((inside - 2 * s.square().sum() + total).clamp(min=0) / total).sqrt().float()
    error_MN = -grad.float()
    decompress_add_(error_MN, s_dd, p, q, 1.0)
    return error_MN.norm() / grad.float().norm()


def fit(
    grads: Sequence[Gradient], p: Projector, q: Projector, *, steps: int = 50, alpha: float = 0.0
) -> tuple[Projector, Projector]:
    """Fits projectors with the same positions to these gradients. For free ones, Adam's step is LR times the rms of the
    numbers, decaying to a tenth of that; it stops early when the mean bias is at most alpha (the host waits)."""
    assert grads and bool(p.group) == bool(q.group), (len(grads), p.kind, q.kind)
    return fit_blocks(grads, p, q) if p.group else _fit_values(grads, p, q, steps, alpha)


@torch.enable_grad()
def _fit_values(
    grads: Sequence[Gradient], p: Projector, q: Projector, steps: int, alpha: float
) -> tuple[Projector, Projector]:
    sides = [(_float(grad), norm_squared(grad).clamp(min=1e-38)) for grad in grads]
    values_p, values_q = (side.values_Rr.clone().requires_grad_() for side in (p, q))
    both = [(values, values.detach().square().mean().sqrt().item()) for values in (values_p, values_q)]
    optimizer = torch.optim.Adam([{"params": [values], "lr": LR * rms} for values, rms in both])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    for _ in range(steps):
        p_MD, q_ND = p.with_values(values_p).dense_Rd(), q.with_values(values_q).dense_Rd()
        errors = []
        for grad, total in sides:
            s_dd = (grad[0] @ p_MD).T @ (grad[1] @ q_ND) if isinstance(grad, tuple) else p_MD.T @ (grad @ q_ND)
            squares = s_dd.square().sum()
            inside = ((p_MD.T @ p_MD) @ s_dd @ (q_ND.T @ q_ND) * s_dd).sum()
            errors.append(((inside - 2 * squares + total) / total).clamp(min=1e-12).sqrt())
        mean = torch.stack(errors).mean()
        if alpha and mean <= alpha:
            break
        optimizer.zero_grad()
        (mean + BETA * (values_p.norm() + values_q.norm())).backward()
        optimizer.step()
        schedule.step()
    return p.with_values(values_p.detach()), q.with_values(values_q.detach())


def fit_blocks(grads: Sequence[Gradient], p: Projector, q: Projector) -> tuple[Projector, Projector]:
    """The closed form: leading eigenvectors block by block, alternating between the sides; one gradient at a time."""
    totals = [norm_squared(grad).clamp(min=1e-38) for grad in grads]
    for turn in range(2):
        p = _block_bases(grads, totals, p, q if turn else None)
        q = _block_bases(grads, totals, q, p, turned=True)
    return p, q


def _float(grad: Gradient, turned: bool = False) -> Gradient:
    """In float32. turned: of the transposed matrix."""
    if isinstance(grad, tuple):
        dy_TM, x_TN = (side.float() for side in grad)
        return (x_TN, dy_TM) if turned else (dy_TM, x_TN)
    return grad.float().T if turned else grad.float()


def _left_pair(grad: Gradient, q: Projector | None) -> tuple[torch.Tensor, torch.Tensor]:
    """u, v of shape [.., m] with u^T v = G G^T, or G Q Q^T G^T if the other side is already projected."""
    if isinstance(grad, tuple):
        dy_TM, x_TN = grad
        if q is None:
            return dy_TM, (x_TN @ x_TN.T) @ dy_TM
        half_DM = compress(x_TN, q).T @ dy_TM
    else:
        half_DM = grad.T if q is None else compress(grad.contiguous(), q).T
    return half_DM, half_DM


def _block_bases(
    grads: Sequence[Gradient], totals: list[torch.Tensor], p: Projector, q: Projector | None, turned: bool = False
) -> Projector:
    """For each block, the r leading eigenvectors of the sum over gradients of u_b^T v_b / ||G||^2. q: of the other
    side; turned: of the transposed gradients."""
    blocks, lost = p.d // p.r, p.d // p.r * p.group - p.rows
    gram_Bgg = torch.zeros(blocks, p.group, p.group, device=p.values_Rr.device)

    def of_blocks(side: torch.Tensor) -> torch.Tensor:
        return (pad(side, (0, lost)) if lost else side.contiguous()).view(-1, blocks, p.group)

    for grad, total in zip(grads, totals, strict=True):  # no two are in float32 at once
        gram_Bgg += torch.einsum("tbg,tbh->bgh", *map(of_blocks, _left_pair(_float(grad, turned), q))) / total
    if lost:  # padding rows come last among the eigenvectors
        gram_Bgg[-1].diagonal()[p.group - lost :] = -1
    gram_Bgg = (gram_Bgg + gram_Bgg.mT) / 2
    if p.group > BATCHED:
        gram_Bgg = gram_Bgg.cpu()
    basis_Bgr = torch.linalg.eigh(gram_Bgg).eigenvectors.flip(2)[:, :, : p.r]
    return p.with_values(basis_Bgr.reshape(-1, p.r)[: p.rows].contiguous().to(p.values_Rr.device))


def transfer_moments(
    m_dd: torch.Tensor, v_dd: torch.Tensor, old: tuple[Projector, Projector], new: tuple[Projector, Projector]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adam's moments in the coordinates of the new projectors. The step count stays."""
    x_p, x_q = (gram(before, after) for before, after in zip(old, new, strict=True))
    return x_p @ m_dd @ x_q.T, x_p.square() @ v_dd @ x_q.square().T
