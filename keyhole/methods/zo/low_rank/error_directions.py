"""Which inputs of a layer predict the error at the head: V of low-rank directions, from forward passes alone.

A direction z = u v^T perturbs the output of a layer by u (v . x). What a step of rate r along the slope c of such
directions gains is  r G - r^2 c^2 J / 2,  c^2 = G + S / rows:  G the square of the gradient within their span, S and J
(which go together) what single rows contribute to its noise, and to the curvature. A random v sees both in equal
shares. So what counts is the ratio of the two in the span of the chosen v, and it differs a lot: all inputs have a
large part in common (their mean, a few outlier columns), which carries most of J and, once a preference for one answer
is corrected, little of G.

The gradient of a matrix W with input x is the sum of  delta_n x_n^T  over tokens, delta_n the error at its output. The
latter needs a backward pass; but the residual stream carries outputs to the head unchanged, apart from what later
layers add, so the error at the head, d_n, known after a forward pass alone, stands in for it:

    D [N, H]    d_n: the gradient of the loss with respect to the hidden states that the head reads
    Y = D P     [N, r] its r principal components (binary choice: one, the signed residual of each question)
    v_j         the direction with the largest  (sum_n y_nj (v . x_n))^2 / (v^T (C + lambda) v),   C = X^T X / N:
                v_j = (C + lambda)^-1 X^T y_j

which is ridge regression of the error on the inputs. lambda = RIDGE times the mean of C's diagonal. C is dominated by a
few directions, so conjugate gradients converge in a few steps, and C is never computed:  4 N I r FLOPs per iteration.
u stays random, so a step estimates the true gradient within the span, whatever the quality of this guess.

Scale: the mean of (v_j . x)^2 is that of |x|^2 / r, as for a random V / sqrt(r), so eps and rates mean the same. A
component with (nearly) no error gives v = 0, and keeps its random column (guide.py).

Bytes: float32 X [N, I] for each layer that is solved at once, D, and a few [N, r] and [I, r].
Legend: N positions, H width, K layers, I inputs of a layer, r rank.
"""

import torch

RIDGE = 3.0
SOLVER_STEPS = 12
POWER_STEPS = 4
LEAST = 1e-3  # of the largest component's norm


def principal_errors(d_NH: torch.Tensor, start_Nr: torch.Tensor) -> torch.Tensor:
    """[N, r] the errors along their r principal directions, by subspace iteration; components with (nearly) no error
    are 0, and so are columns beyond the width. start_Nr: random numbers."""
    p_Hr, _ = torch.linalg.qr(d_NH.t() @ start_Nr)
    for _ in range(POWER_STEPS):
        p_Hr, _ = torch.linalg.qr(d_NH.t() @ (d_NH @ p_Hr))
    y_Nr = d_NH @ p_Hr
    norm_r = y_Nr.norm(dim=0)
    y_Nr = y_Nr * (norm_r > LEAST * norm_r.max())
    return torch.nn.functional.pad(y_Nr, (0, start_Nr.shape[1] - y_Nr.shape[1]))


def predictors(x_KNI: torch.Tensor, y_Nr: torch.Tensor) -> torch.Tensor:
    """[K, r, I] the directions of the inputs of K layers that predict the errors best, scaled."""
    count, width = x_KNI.shape[1:]
    energy_K = x_KNI.square().sum(dim=(1, 2))[:, None, None] / count
    v_KIr = _ridge(x_KNI, x_KNI.mT @ y_Nr / count, RIDGE * energy_K / width)
    seen_Kr = (x_KNI @ v_KIr).square().mean(dim=1, keepdim=True)
    scaled_KIr = v_KIr * (energy_K / y_Nr.shape[1] / seen_Kr).sqrt()
    return torch.where(seen_Kr > 0, scaled_KIr, torch.zeros_like(v_KIr)).mT.contiguous()


def _ridge(x_KNI: torch.Tensor, b_KIr: torch.Tensor, ridge_K: torch.Tensor) -> torch.Tensor:
    """(X^T X / N + ridge)^-1 b by conjugate gradients, for every layer and column of b on its own."""
    v_KIr, left_KIr = torch.zeros_like(b_KIr), b_KIr.clone()
    way_KIr, left_Kr = left_KIr.clone(), left_KIr.square().sum(dim=1, keepdim=True)
    for _ in range(SOLVER_STEPS):
        applied_KIr = x_KNI.mT @ (x_KNI @ way_KIr) / x_KNI.shape[1] + ridge_K * way_KIr
        length_Kr = _ratio(left_Kr, (way_KIr * applied_KIr).sum(dim=1, keepdim=True))
        v_KIr = v_KIr + length_Kr * way_KIr
        left_KIr = left_KIr - length_Kr * applied_KIr
        before_Kr, left_Kr = left_Kr, left_KIr.square().sum(dim=1, keepdim=True)
        way_KIr = left_KIr + _ratio(left_Kr, before_Kr) * way_KIr
    return v_KIr


def _ratio(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x / y, and 0 where y is."""
    return torch.where(y > 0, x / y, torch.zeros_like(x))
