"""A low-rank sum in fewer terms: M = sum_j a_j v_j^T, j < k, by the m largest of its singular triples.

    a = R_a Q_a,  v = R_v Q_v        rows of Q orthonormal: O and I columns, min(k, O) and min(k, I) rows
    R_a^T R_v = U diag(s) W^T        a small matrix; s are the singular values of M
    a' = diag(s) U^T Q_a,  v' = W^T Q_v

The m rows with the largest s are kept; the Frobenius norm of the rest is sqrt(sum of s_i^2, i >= m), by Eckart and
Young the smallest error of any m terms. Computed on the host in float64, so that a model on any device of a machine
gets the same numbers; another machine may round otherwise.
Legend: k rows now, m rows kept; O outputs, I inputs.
"""

import torch

NOTHING = 3e-6  # of the norm: terms below the rounding of float32 are always dropped


def compressed(
    a_kO: torch.Tensor, v_kI: torch.Tensor, share: float, lost: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """(a' / scale, v' * scale, the norm that is lost, the norm of the sum), on the host: the fewest terms, one at
    least, for which that and `lost`, which earlier sums have lost in energy, are this share of the norm at most."""
    q_Oa, r_ak = torch.linalg.qr(a_kO.t().to("cpu", torch.float64))
    q_Iv, r_vk = torch.linalg.qr(v_kI.t().to("cpu", torch.float64))
    u, s_n, w = torch.linalg.svd(r_ak @ r_vk.t(), full_matrices=False)
    tails = torch.cat([s_n.square().flip(0).cumsum(0).flip(0), s_n.new_zeros(1)]).sqrt()  # lost by the first m terms
    norm = float(tails[0])
    most = max(0.0, (share * norm) ** 2 - lost) ** 0.5
    m = max(1, int((tails > max(most, NOTHING * norm)).sum()))
    a_mO, v_mI = (q_Oa @ (u[:, :m] * s_n[:m])).t() / scale, (q_Iv @ w[:m].t()).t() * scale
    return a_mO.float().contiguous(), v_mI.float().contiguous(), float(tails[m]), norm
