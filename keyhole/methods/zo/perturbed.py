"""The weights of a model at the looks of a step: w + eps z and w - eps z, computed when a unit arrives.

The copies of a unit lie in memory that the next unit reuses (`copies`: one pair of them, more while the pairs of looks
run beside each other); those of the spine live through the step, since every block needs them (`spines`, two per pair
of looks). With low-rank directions blocks have no copies: `layers` adds the perturbation to their products
(low_rank/layers.py). The sweep that fills and uses the copies is passes.py.

Bytes: two copies of the largest unit that is perturbed as a whole, and two of the spine per pair of looks, in the dtype
of compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from keyhole import ops
from keyhole.methods.zo.arguments import Applied, Perturbation
from keyhole.methods.zo.estimators.base import Pair
from keyhole.methods.zo.low_rank.factors import Factors
from keyhole.methods.zo.low_rank.layers import FactoredLayers
from keyhole.methods.zo.update import Update
from keyhole.model.forward.branches import Branches
from keyhole.model.model import Model
from keyhole.ops.arguments import Count


class PerturbedWeights:
    """Memory for perturbed weights, and what perturbs them. pairs: the most pairs of looks of a step; block_at_once:
    the model runs all units of a block at once (compiled code cannot stop inside a block)."""

    def __init__(self, model: Model, update: Update, eps: float, pairs: int, block_at_once: bool = False) -> None:
        self.model, self.update, self.eps, self.block_at_once = model, update, eps, block_at_once
        layout, dtype, device = model.layout, model.dtype, model.device
        dense = max((u.numel for u in layout.units[1:] if u.index not in update.elsewhere), default=0)
        self.plus, self.minus = (torch.empty(dense, dtype=dtype, device=device) for _ in range(2))
        self.copies = [(self.plus, self.minus)]  # of a unit; more than one within `captured`
        self.spines = torch.empty((pairs, 2, layout.spine.numel), dtype=dtype, device=device)
        self.layers: FactoredLayers | None = None  # low-rank directions of the blocks
        self.step: Count = 0  # whose directions are used; within `captured` a number on the device
        self.branches = Branches()  # streams for looks, within `captured`

    @property
    def factors(self) -> Factors | None:
        """The factors of low-rank directions; None: all directions are dense."""
        return None if self.layers is None else self.layers.factors

    def perturbation(self, pair: Pair) -> Perturbation:
        """The step, eps and direction of a pair, as arguments of ops."""
        eps = self.eps * pair.scale
        return {"step": self.step, "eps": eps, "direction": pair.direction, "beside": pair.beside}

    def rows(self, stale_MH: torch.Tensor, ids_M: torch.Tensor, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a trained table at both looks of a pair, from the rows at home, which get the pending update."""
        table, update = self.model.layout.table, self.update
        fused: Applied = {}
        if update.pending is not None:
            fused = update.fused(update.pending, decays=id(table.param) not in update.spared)
        step = ops.ZOStep(table.start, **update.noise, **self.perturbation(pair), **fused)
        return ops.zo_rows(stale_MH, ids_M, step, self.model.dtype)

    @contextmanager
    def captured(
        self, step: Count, branches: Branches, more: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> Iterator[None]:
        """A context in which directions are those of a step whose number is on the device, and looks have streams.
        more: copies of a unit, for further pairs of looks."""
        before, self.step, self.branches, self.copies = self.step, step, branches, [*self.copies, *more]
        try:
            yield
        finally:
            self.step, self.branches, self.copies = before, Branches(), self.copies[:1]
