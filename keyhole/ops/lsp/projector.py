"""(d, r)-sparse projectors (LSP-Offload): R x d matrices with r entries per row, in three arrangements.

A weight W [m, n] with gradient G = dY^T X is trained through P [m, d] and Q [n, d]: the optimizer sees only
S = P^T G Q = (dY P)^T (X Q), and W is updated by P delta Q^T. A projector is its entries `values_Rr` and a rule for the
column of each entry:

    free      r different columns per row, drawn at random, as in the paper. 8 r bytes per row. Memory is read one
              number at a time.
    runs      64 consecutive rows share a draw of r runs of 64 columns; row i has column i % 64 of each run. Still
              (d, r)-sparse with every entry free, 4 r bytes per row, and memory is accessed 64 numbers at a time
              (run = 64; "free" is the same with run = 1).
    blocks    rows in groups of g; only group b has entries in columns b r .. b r + r - 1: an orthonormal basis.
              No positions to store; P^T P = I; compressing is a batch of small matrix products; the best basis is
              known in closed form (PCA of each block of the gradient).

A column has entries in R r / d rows (its sources). For runs, the draws go through shuffled lists of all runs, so that
the numbers of sources differ by at most one. d is reduced to what the matrix allows (d <= R; a multiple of the run
length, which is halved until r runs exist; a whole number of blocks), so read d from the projector.
Legend: R rows, d columns, r entries per row, L most sources of a column, rounded up.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch

RUN = 64
UNROLL = 4  # sources that a kernel reads at a time; lists of sources are padded to a multiple


@dataclass(frozen=True)
class Projector:
    """A sparse R x d matrix. All tensors on one device."""

    values_Rr: torch.Tensor
    d: int
    group: int = 0  # rows of a block; 0: columns come from `runs`
    run: int = 1  # columns (and rows) in a run
    runs: torch.Tensor | None = None  # int32 [ceil(R / run), r]: indices of runs of columns
    sources: torch.Tensor | None = None  # int32 [d / run, L]: indices into `runs` where a run occurs; -1: none

    @property
    def rows(self) -> int:
        return self.values_Rr.shape[0]

    @property
    def r(self) -> int:
        return self.values_Rr.shape[1]

    @property
    def kind(self) -> str:
        return "blocks" if self.group else "free" if self.run == 1 else "runs"

    def columns_Rr(self) -> torch.Tensor:
        """The column of each entry, int64."""
        row_R1 = torch.arange(self.rows, device=self.values_Rr.device)[:, None]
        if self.group:
            return row_R1 // self.group * self.r + torch.arange(self.r, device=self.values_Rr.device)
        runs = cast(torch.Tensor, self.runs)  # there are some, if not blocks
        return runs[row_R1[:, 0] // self.run].long() * self.run + row_R1 % self.run

    def dense_Rd(self) -> torch.Tensor:
        """The matrix with its zeros, for tests and for fitting; differentiable in the values."""
        zeros_Rd = torch.zeros(self.rows, self.d, device=self.values_Rr.device, dtype=self.values_Rr.dtype)
        return zeros_Rd.scatter(1, self.columns_Rr(), self.values_Rr)

    def with_values(self, values_Rr: torch.Tensor) -> "Projector":
        """The same positions with other entries."""
        assert values_Rr.shape == self.values_Rr.shape, (values_Rr.shape, self.values_Rr.shape)
        return replace(self, values_Rr=values_Rr)

    def to(self, device: torch.device | str) -> "Projector":
        """The same on another device."""
        moved: dict[str, Any] = {name: t.to(device) for name, t in vars(self).items() if isinstance(t, torch.Tensor)}
        return replace(self, **moved)


def find_sources(runs: torch.Tensor, count: int) -> torch.Tensor:
    """For each of `count` runs, where in the flattened table it occurs, in order; padded with -1."""
    order = torch.argsort(runs.flatten(), stable=True)
    named = runs.flatten()[order].long()
    counts = torch.bincount(named, minlength=count)
    place = torch.arange(order.numel()) - (counts.cumsum(0) - counts)[named]
    sources = torch.full((count, max(1, -(-int(counts.max()) // UNROLL)) * UNROLL), -1, dtype=torch.int32)
    sources[named, place] = order.int()
    return sources


def _projector(runs: torch.Tensor, run: int, rows: int, d: int, generator: torch.Generator) -> Projector:
    """Entries from N(0, 1 / r), so that P P^T is the identity on average, at the positions of `runs`."""
    r = runs.shape[1]
    values_Rr = torch.randn(rows, r, generator=generator) / r**0.5
    return Projector(values_Rr, d, run=run, runs=runs.int(), sources=find_sources(runs, d // run))


def free(rows: int, d: int, r: int, generator: torch.Generator) -> Projector:
    """r different columns per row, all choices equally likely."""
    draws = [torch.rand(min(1024, rows - i), d, generator=generator).topk(r).indices for i in range(0, rows, 1024)]
    return _projector(torch.cat(draws), 1, rows, d, generator)


def runs(rows: int, d: int, r: int, generator: torch.Generator, run: int = RUN) -> Projector:
    """r different runs for every `run` rows; how often runs are drawn differs by at most one."""
    while run > 1 and d // run < r:
        run //= 2
    count, lines = d // run, -(-rows // run)
    deck, table = torch.empty(0, dtype=torch.int64), []
    for _ in range(lines):
        if deck.numel() < r:
            fresh = torch.randperm(count, generator=generator)
            held = torch.isin(fresh, deck)  # runs still in the deck go to the end, so that no row has one twice
            deck = torch.cat([deck, fresh[~held], fresh[held]])
        table.append(deck[:r])
        deck = deck[r:]
    return _projector(torch.stack(table), run, rows, count * run, generator)


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


KINDS = {"free": free, "runs": runs, "blocks": blocks}


def random_projector(
    kind: str, rows: int, d: int, r: int, *, seed: int, device: torch.device | str = "cpu"
) -> Projector:
    """A newly drawn projector: the same on every device."""
    assert rows > 0 and d > 0 and r > 0, (rows, d, r)
    d = min(d, rows)
    return KINDS[kind](rows, d, min(r, d), torch.Generator().manual_seed(seed)).to(device)


def identity_projector(rows: int, device: torch.device | str = "cpu") -> Projector:
    """d = R, nothing is lost: training in the subspace is then plain training."""
    positions = torch.arange(rows, dtype=torch.int32)[:, None]
    return Projector(torch.ones(rows, 1), rows, runs=positions, sources=find_sources(positions, rows)).to(device)
