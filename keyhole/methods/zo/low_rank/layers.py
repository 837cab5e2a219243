"""The layers of a model, as far as they add low-rank factors to what they compute (model/forward/low_rank.py), and what
they have learned, merged into the weights.

The model holds this object while factors are trained beside its weights. Its layers ask it for the terms that they add:
those of the running pass, which carries one or several looks of a step (`Share`), or of the unperturbed weights outside
of a step. What the factors are, and how they are trained, is in factors.py.

    a linear layer of a block         x W^T + (x V) A^T, with the A of each look for its rows
    another module with vectors       norms and other modules whose trained parameters differ by look: called with
                                      those of the look, or look by look

From the factors into the weights, W <- round(W + A V^T / sqrt(r)):

    fold         what a period has learned, when it ends: every block crosses the link once more per period. With it
                 the vectors beside the matrices, which a save takes from the factors otherwise
    as_saved     a copy of the matrix with everything that was learned, also within the period, rounded once; the
                 weights at home are not changed
    settle       another method will train the weights: everything is merged into them

The kernel is ops/lowrank/fold.py. Rounding bits are a function of (seed, step, element), so a tile of rows gives those
of the whole matrix. Bytes in 16 bit: 2 read and 2 written per element, once per period.
"""

import weakref

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.zo.low_rank.factors import Factors, Fold, Rows
from keyhole.methods.zo.low_rank.guide import Guide
from keyhole.methods.zo.low_rank.parts import Matrix, Vector, vector_at
from keyhole.model.forward.low_rank import Added, LowRank, Share, ask, by_look, once, with_factors
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Unit
from keyhole.model.weights.homes import view


class FactoredLayers(LowRank):
    """The layers of one model, which add these factors from now on. guide: sees the inputs of layers."""

    def __init__(self, model: Model, factors: Factors, guide: Guide | None = None) -> None:
        """Makes the module's forward ask for the factors: in linear layers, in blocks before the first trained weight,
        and in other modules with vectors of their own, in a block or in the common unit."""
        self.model: Model = weakref.proxy(model)  # which holds this object
        self.factors, self.guide, self.shares, self.differ = factors, guide, {}, set()
        self.by_layer = {id(matrix.layer): i for i, matrix in enumerate(factors.parts.matrices)}
        self.by_owner: dict[int, list[Vector]] = {}  # vectors of modules without a matrix, by module
        for vector in factors.parts.vectors:
            if id(vector.owner) not in self.by_layer:
                self.by_owner.setdefault(id(vector.owner), []).append(vector)
        common = {id(t.param): t for t in model.layout.common.tensors}
        inside = model.module if model.classifies else model.head.decoder
        others = [m for m in inside.modules() if id(m) not in self.by_layer]
        in_common = {id(m): [common[id(p)] for p in m._parameters.values() if id(p) in common] for m in others}
        self.in_common: dict[int, list[FlatTensor]] = in_common  # by module
        owners = [m for m in others if in_common[id(m)] or id(m) in self.by_owner]
        plain = not model.classifies and not model.head.transforms
        self.together = plain and not any(any(owner.children()) for owner in owners)
        for layer in [matrix.layer for matrix in factors.parts.matrices]:
            ask(model, layer, with_factors(layer, model.tiles.get(id(layer))))
        self.trained_blocks = {id(b) for b in model.blocks if any(p.requires_grad for p in b.parameters())}
        if model.blocks and id(model.blocks[0]) not in self.trained_blocks:
            same: dict[tuple, bool] = {}
            for block in model.blocks:
                ask(model, block, once(id(block), same))
        for owner in owners:
            if self.together or id(owner) in self.by_owner:
                ask(model, owner, by_look(owner))
        model.methods.low_rank = self

    def describe(self) -> list[str]:
        """Lines for the start block."""
        factors, parts = self.factors, self.factors.parts
        end = "folded into the weights" if factors.folds else "kept beside weights that never change"
        size = (4 * (factors.now.numel() + factors.looks.numel()) + factors.v.nbytes) / 2**20
        what = f"low rank: z = U V^T / sqrt({factors.rank}) in {len(parts.matrices)} linear layers"
        learned = f"learned in {parts.numel:,} numbers ({size:.1f} MiB with V and looks)"
        if self.guide is not None:
            what += (
                f", V from the errors of {self.guide.rows:,} rows (all, if there are fewer) at the start of each period"
            )
        when = f"every {factors.refresh} steps a new V, and what was learned is {end}"
        if self.guide is None:
            share = factors.rank / (factors.rank + 1)
            when += f"; the best rate is about {share:.2f} of that of dense directions, or less"
        passes = "one for all looks at a batch" if self.together else "one for each look at a batch"
        return [f"{what}, {learned}; {when}", f"passes: {passes}"]

    def check(self) -> None:
        """UserError if the model does not use them any more."""
        if self.model.methods.low_rank is not self:
            raise UserError(
                "zo.rank: another method was made on this model since, and what the factors had learned was merged "
                "into its weights: the layers do not see them any more. Make a new ZO to train on"
            )

    # -- what the layers ask for, in a pass ------------------------------------------------------------------------

    def graph_key(self) -> tuple[Share | int | None, ...] | None:
        if not self.shares or not self.factors.folds or self.commons is None:
            return None
        memory = (self.factors.looks, self.factors.v, self.commons)
        return self.running, *(tensor.data_ptr() for tensor in memory)

    def added_to(self, layer: torch.nn.Module, x: torch.Tensor) -> Added | None:
        index = self.by_layer.get(id(layer))
        if index is None:
            return None
        if self.guide is not None and self.guide.inputs is not None:
            self.guide.inputs.see(index, x)
        factors, share, bias = self.factors, self.running, None
        matrix = factors.parts.matrices[index]
        flat = factors.now[None] if share is None else factors.looks[share.first : share.first + share.count]  # [L, n]
        if isinstance(matrix.bias, slice):
            bias = flat[:, matrix.bias]
        elif matrix.bias is not None and self.commons is not None and share is not None:
            begin = matrix.bias.start - self.model.layout.common.start
            bias = self.commons[share.first : share.first + share.count, begin : begin + matrix.outputs]
        elif (own := getattr(layer, "bias", None)) is not None:
            bias = own[None].expand(flat.shape[0], -1)
        earlier = factors.rooms[index] if factors.kept else None
        b_LrO = flat[:, matrix.a].unflatten(1, (factors.rank, matrix.outputs))
        return Added(factors.rows(factors.v, matrix.v), b_LrO, bias, earlier, matrix.transposed)

    def point(self, module: torch.nn.Module, look: int | None, several: bool) -> None:
        flat = self.factors.now if look is None else self.factors.looks[look]
        for vector in self.by_owner.get(id(module), ()):
            vector.tensor.param.data = vector_at(flat, vector).to(self.model.dtype)
        if several:
            assert self.commons is not None  # a pass carries several looks in a step only
            for tensor in self.in_common.get(id(module), ()):
                tensor.param.data = view(self.commons[look], tensor, self.model.layout.common.start)

    # -- into the weights ------------------------------------------------------------------------------------------

    def fold(self, folds: list[Fold]) -> None:
        """Folds finished periods into the homes of all blocks."""
        model = self.model
        with torch.no_grad(), model.rewriting_shared(), model.sweep("flush", experts=True):
            for unit in model.layout.of_kind("block"):
                if unit.index not in model.homes.foreign:
                    self.arrive(unit, model.engine.acquire(unit.index), folds)
                    model.engine.commit(unit.index)
                    model.engine.release(unit.index)

    def arrive(self, unit: Unit, w: torch.Tensor, folds: list[Fold]) -> None:
        """Folds periods into a unit that is on the device as at home, and updates its vectors."""
        factors = self.factors
        first, last = (0, None) if unit.rows is None else unit.rows
        inside = {id(tensor.param) for tensor in unit.tensors}
        for fold in folds:
            for matrix in [one for one in factors.parts.matrices if id(one.tensor.param) in inside]:
                part = view(w, matrix.tensor, unit.start) if last is None else w[: (last - first) * matrix.inputs]
                rows = factors.rows(fold.a, matrix.a), factors.rows(fold.v, matrix.v)
                self._add(matrix, part.view(-1, matrix.tensor.shape[1]), rows, fold.step, first)
        for vector in [one for one in factors.parts.vectors if id(one.tensor.param) in inside]:
            view(w, vector.tensor, unit.start).copy_(vector_at(factors.now, vector))

    def _add(self, matrix: Matrix, w: torch.Tensor, rows: Rows, step: int, first_row: int = 0) -> None:
        """W <- round(W + A V^T), or a tile of its rows."""
        a, v = (x.to(w.device) for x in rows)
        if not matrix.transposed:
            a = a[:, first_row : first_row + w.shape[0]].contiguous()
        left, right = (v, a) if matrix.transposed else (a, v)
        begin, seed, rounding = matrix.tensor.start, self.factors.noise["seed"], self.factors.rounding
        ops.fold_(w, left, right, offset=begin, first_row=first_row, seed=seed, step=step, rounding=rounding)

    def as_saved(self, tensor: FlatTensor, home: torch.Tensor, merged: bool = True) -> torch.Tensor:
        """A parameter with everything that was learned, rounded once; `home` itself if nothing is to be added.
        merged=False: matrices as they are at home."""
        parts = self.factors.parts
        for vector in parts.vectors:
            if vector.tensor is tensor:
                return vector_at(self.factors.now, vector).to(home)
        for index, matrix in enumerate(parts.matrices):
            if matrix.tensor is tensor and merged and (rows := self.factors.learned(index)) is not None:
                whole = home.to(self.factors.now.device, copy=True)  # on the CPU a large model would take minutes
                self._add(matrix, whole, rows, self.factors.steps)
                return whole.to(home.device)
        return home

    def sample(self, tensor: FlatTensor) -> torch.Tensor | None:
        """What is currently learned of a tensor beside its home; None if it is trained at home."""
        factors = self.factors
        found = [factors.now[vector.at] for vector in factors.parts.vectors if vector.tensor is tensor]
        pairs = zip(factors.parts.matrices, factors.rooms, strict=True)
        mine = ((matrix.a, a_kO) for matrix, (a_kO, _) in pairs if matrix.tensor is tensor)
        found += [factors.now[a] + a_kO.float().sum(0).repeat(factors.rank) for a, a_kO in mine]
        return found[0] if found else None

    @torch.no_grad()
    def settle(self) -> None:
        """Merges everything that was learned into the weights at home, also within a period, and ends."""
        model, parts = self.model, self.factors.parts
        tensors = [m.tensor for m in parts.matrices] + [v.tensor for v in parts.vectors] if self.factors.steps else []
        if any(map(model.homes.is_packed, tensors)):
            raise UserError("zo.fold=false: weights that are packed are frozen; save the model and load that")
        with model.rewriting_shared():
            for tensor in tensors:
                if not model.homes.is_foreign(tensor):
                    home = model.home(tensor)
                    home.copy_(self.as_saved(tensor, home))
            model.engine.invalidate()
        model.methods.low_rank = None
