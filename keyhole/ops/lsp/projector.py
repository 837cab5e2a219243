"""(d, r)-sparse projectors (LSP-Offload): R x d matrices with r entries per row, in two arrangements.

A weight W [m, n] with gradient G = dY^T X is trained through P [m, d] and Q [n, d]: the optimizer sees only
S = P^T G Q = (dY P)^T (X Q), and W is updated by P delta Q^T. A projector is its entries `values_Rr` and a rule for the
column of each entry:

    free      r different columns per row, drawn at random, as in the paper. 8 r bytes per row. Products are dense, with
              the zeros.
    blocks    rows in groups of g; only group b has entries in columns b r .. b r + r - 1: an orthonormal basis.
              No positions to store; P^T P = I; compressing is a batch of small matrix products; the best basis is
              known in closed form (PCA of each block of the gradient).

d is reduced to what the matrix allows (d <= R; a whole number of blocks), so read d from the projector.
Legend: R rows, d columns, r entries per row.
"""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Projector:
    """A sparse R x d matrix. All tensors on one device."""

    values_Rr: torch.Tensor
    d: int
    group: int = 0  # rows of a block; 0: columns are `drawn_Rr`
    drawn_Rr: torch.Tensor | None = None  # int64

    @property
    def rows(self) -> int:
        return self.values_Rr.shape[0]

    @property
    def r(self) -> int:
        return self.values_Rr.shape[1]

    @property
    def kind(self) -> str:
        return "blocks" if self.group else "free"

    def columns_Rr(self) -> torch.Tensor:
        """The column of each entry, int64."""
        if self.drawn_Rr is not None:
            return self.drawn_Rr
        row_R1 = torch.arange(self.rows, device=self.values_Rr.device)[:, None]
        return row_R1 // self.group * self.r + torch.arange(self.r, device=self.values_Rr.device)

    def dense_Rd(self) -> torch.Tensor:
        """The matrix with its zeros; differentiable in the values."""
        zeros_Rd = torch.zeros(self.rows, self.d, device=self.values_Rr.device, dtype=self.values_Rr.dtype)
        return zeros_Rd.scatter(1, self.columns_Rr(), self.values_Rr)

    def with_values(self, values_Rr: torch.Tensor) -> "Projector":
        """The same positions with other entries."""
        assert values_Rr.shape == self.values_Rr.shape, (values_Rr.shape, self.values_Rr.shape)
        return replace(self, values_Rr=values_Rr)

    def to(self, device: torch.device | str) -> "Projector":
        """The same on another device."""
        drawn_Rr = None if self.drawn_Rr is None else self.drawn_Rr.to(device)
        return replace(self, values_Rr=self.values_Rr.to(device), drawn_Rr=drawn_Rr)


def free(rows: int, d: int, r: int, generator: torch.Generator) -> Projector:
    """r different columns per row, all choices equally likely; entries from N(0, 1 / r), so that P P^T is the identity
    on average."""
    draws = [torch.rand(min(1024, rows - i), d, generator=generator).topk(r).indices for i in range(0, rows, 1024)]
    return Projector(torch.randn(rows, r, generator=generator) / r**0.5, d, drawn_Rr=torch.cat(draws))


def blocks(rows: int, d: int, r: int, generator: torch.Generator) -> Projector:
    """Random orthonormal columns in each block of about R r / d rows. A short last block may have zero columns."""
    group = max(r, -(-rows // (d // r)))
    count = -(-rows // group)
    basis_Bgr = torch.linalg.qr(torch.randn(count, group, r, generator=generator)).Q
    last = rows - (count - 1) * group
    if last < group:
        basis_Bgr[-1] = 0
        basis_Bgr[-1, :last, : min(last, r)] = torch.linalg.qr(torch.randn(last, min(last, r), generator=generator)).Q
    return Projector(basis_Bgr.reshape(-1, r)[:rows].contiguous(), count * r, group=group)


KINDS = {"free": free, "blocks": blocks}


def random_projector(
    kind: str, rows: int, d: int, r: int, *, seed: int, device: torch.device | str = "cpu"
) -> Projector:
    """A newly drawn projector: the same on every device."""
    d = min(d, rows)
    return KINDS[kind](rows, d, min(r, d), torch.Generator().manual_seed(seed)).to(device)


def identity_projector(rows: int, device: torch.device | str = "cpu", kind: str = "blocks") -> Projector:
    """d = R, nothing is lost: training in the subspace is then plain training. blocks: of one row."""
    one_R1 = torch.ones(rows, 1, device=device)
    if kind == "blocks":
        return Projector(one_R1, rows, group=1)
    return Projector(one_R1, rows, drawn_Rr=torch.arange(rows, device=device)[:, None])
