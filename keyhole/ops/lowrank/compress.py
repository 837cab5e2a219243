"""A low-rank sum in fewer terms: M = sum_j a_j v_j^T, j < k, by the m largest of its singular triples.

Only the Gram matrices of the factors' rows are needed, k x k numbers:

    v v^T = E^T diag(d) E            eigenvectors as rows: E v has orthogonal rows, of squared norms d
    b = diag(sqrt d) E a             M = b^T q, with q = diag(1 / sqrt d) E v, whose rows are orthonormal
    b b^T = diag(sqrt d) E (a a^T) E^T diag(sqrt d) = F^T diag(s^2) F
    a' = F b,  v' = F q              M = a'^T v' still; rows of a' are orthogonal with norms s, the singular values of M

If there are more terms than the shorter side of M has elements, M itself is computed instead, as min(O, I) terms with
unit vectors on that side (`fewest`): k, whose cube the eigenvectors cost, is never above it.

The m rows with the largest s are kept; the Frobenius norm of the rest is sqrt(sum of s_i^2, i >= m), by Eckart and
Young the smallest error of any m terms. Rows of v that depend on others (d below NOTHING of the largest) are left out:
the part of M there is below the rounding of float32.

The bits are the same on every device: products by exact.py, eigenvectors by eigen.py. All matrices of a model are
compressed with the same k, that of the longest, padded with rows of zeros; this takes some 15 x TOGETHER_BYTES of
temporary memory. Operations per matrix: 8 k^2 (O + I) for the products, as many for a' and v' times m / k, and some
500 k^3.
Legend: B matrices; k rows now, m rows kept; O outputs, I inputs.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

import torch

from keyhole.ops.lowrank.eigen import eigen, root
from keyhole.ops.lowrank.exact import exact_product

NOTHING = 1e-11
TOGETHER_BYTES = {"cpu": 2**20, "cuda": 2**25}  # of k x k numbers: fits the cache; enough to keep a GPU busy
COLUMNS = 2**14


def fewest(a_kO: torch.Tensor, v_kI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same sum in min(O, I) terms at most, accurate to float64 as far as exact.py is."""
    (k, outputs), inputs = a_kO.shape, v_kI.shape[1]
    if k <= min(outputs, inputs):
        return a_kO, v_kI
    if inputs <= outputs:
        return exact_product(v_kI.t(), a_kO.t()), torch.eye(inputs, dtype=torch.float64, device=v_kI.device)
    return torch.eye(outputs, dtype=torch.float64, device=a_kO.device), exact_product(a_kO.t(), v_kI.t())


def gram(x_kN: torch.Tensor, k: int) -> torch.Tensor:
    """x x^T [k, k] in float64, zero-padded if x has fewer rows."""
    own = exact_product(x_kN, x_kN)
    found = own.new_zeros(k, k)
    found[: len(own), : len(own)] = own
    return found


@dataclass(frozen=True)
class Cut:
    """The transformation to fewer terms: a' = by_a a, v' = by_v v, rows by decreasing singular value."""

    by_a_kk: torch.Tensor
    by_v_kk: torch.Tensor
    singular: list[float]

    @property
    def norm(self) -> float:
        """The Frobenius norm of the sum."""
        return math.sqrt(max(accumulate(s * s for s in reversed(self.singular))))

    def rank_within(self, most: float) -> tuple[int, float]:
        """(m, lost): the fewest terms that lose at most this norm, and the norm that they lose."""
        tails = [0.0, *map(math.sqrt, accumulate(s * s for s in reversed(self.singular)))]
        most = max(most, math.sqrt(NOTHING) * self.norm)  # terms below rounding are always dropped
        dropped = max(i for i, lost in enumerate(tails) if lost <= most)
        return len(self.singular) - dropped, tails[dropped]


def together(k: int, device: torch.device) -> int:
    """How many matrices to process at once for speed; it changes no bit."""
    return max(1, TOGETHER_BYTES.get(device.type, 2**20) // (8 * k * k))


def cuts(a_Bkk: torch.Tensor, v_Bkk: torch.Tensor) -> list[Cut]:
    """The Cut of every matrix, from the Gram matrices of its rows (gram)."""
    d_Bk, e_Bkk = eigen(v_Bkk)
    d_Bk = torch.where(d_Bk > NOTHING * d_Bk.amax(1, keepdim=True), d_Bk, 0.0)
    root_Bk1 = root(d_Bk)[:, :, None]
    inverse_Bk1 = torch.where(root_Bk1 > 0, 1.0 / torch.where(root_Bk1 > 0, root_Bk1, 1.0), 0.0)
    by_a, by_v = root_Bk1 * e_Bkk, inverse_Bk1 * e_Bkk
    h_Bkk = exact_product(by_a, exact_product(by_a, a_Bkk))
    s2_Bk, f_Bkk = eigen((h_Bkk + h_Bkk.mT) * 0.5)
    s2_Bk, order_Bk = s2_Bk.clamp(min=0.0).sort(dim=1, descending=True, stable=True)
    f_Bkk = f_Bkk.gather(1, order_Bk[:, :, None].expand_as(f_Bkk))
    by_a, by_v = exact_product(f_Bkk, by_a.mT), exact_product(f_Bkk, by_v.mT)
    singular = root(s2_Bk).tolist()
    return [Cut(*rows) for rows in zip(by_a, by_v, singular, strict=True)]


def combine(by_mk: torch.Tensor, x_kN: torch.Tensor, scale: float) -> torch.Tensor:
    """scale (by x) [m, N] in float32. scale: a power of two. Processes a part of the columns at a time."""
    by_mk = by_mk[:, : len(x_kN)]
    parts = [exact_product(by_mk, part.t()) * scale for part in x_kN.split(COLUMNS, dim=1)]
    return torch.cat([part.float() for part in parts], dim=1)
