"""The factors of low-rank directions: perturbed for a step, updated after it, folded or kept at the end of a period.

For every linear layer W [O, I] of the blocks, step t in period k = t // refresh, direction i:

    z_i = U_{t,i} V_k^T / sqrt(r)        U [O, r], V [I, r] from Philox: (seed, t, i, element), (seed, k, element)
    W_t = W + A V_k^T / sqrt(r)          A [O, r] float32: what this period has learned
    look:    A +- eps U_{t,i}            the weights w +- eps z_i, without a copy of them
    update:  A <- A - lr sum_i c_i U_{t,i}

An element of z_i has variance 1, as in a dense direction, so eps and rates mean the same. (LOZO has U V^T, and lr / r
in the update: the same step, with an eps larger by sqrt(r).) So a low-rank step is a dense step on the array of all A,
which is thousands of times smaller than the model: both use the same kernel (ops/zo/flat.py), in float32. v holds
V / sqrt(r), rounded to the dtype of compute; every use has these rounded numbers.

When a period ends, A is reset to 0, and what the period has learned is

    folded    W <- round(W + A V_k^T / sqrt(r)) at the unit's next visit (merge.py): W is read and written once per
              period, and not written within it
    kept      as r more terms beside W, which never changes and so may be frozen in any format; from time to time the
              terms are compressed to fewer terms (kept.py)

A fold rounds once per period, where dense steps round after every update: less often by a factor of `refresh`.

Bytes, for n numbers in all A and vectors, m in all V, L looks, b bytes per number in compute:
4 n + 4 L n + b m; until a fold is done 4 n + b m more; for each kept period b (n + m) (kept.py).
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.zo.low_rank import merge
from keyhole.methods.zo.low_rank.guide import Guide
from keyhole.methods.zo.low_rank.kept import Kept
from keyhole.methods.zo.low_rank.merge import Fold
from keyhole.methods.zo.low_rank.parts import Parts, Vector, find_parts, readers, vector_at, waiting
from keyhole.methods.zo.low_rank.peft_adapter import write_factors
from keyhole.methods.zo.rate_search import rate_share
from keyhole.methods.zo.update import Pending
from keyhole.model.forward.frozen_start import install_once
from keyhole.model.forward.low_rank import Added, Share, install, install_by_look, install_relu
from keyhole.model.forward.pending import install_ends
from keyhole.model.forward.sketches import Readers
from keyhole.model.model import Model
from keyhole.model.structure.find import relu_reader
from keyhole.model.structure.layout import ALIGN, FlatTensor, Unit
from keyhole.model.weights.format import PACKED
from keyhole.model.weights.homes import view


class Factors:
    """The factors of one model. noise: seed, distribution. The model holds them, and its linear layers add them."""

    def __init__(
        self,
        model: Model,
        noise: dict[str, Any],
        *,
        rank: int,
        refresh: int,
        fold: bool,
        rounding: str,
        pairs: int,
        merge: bool = True,
        fold_periods: int | None = None,
        fold_error: float = 0.0,
        guide: int | None = None,
    ) -> None:
        self.model, self.noise, self.rounding = weakref.proxy(model), noise, rounding
        self.rank, self.refresh, self.folds, self.merges = rank, refresh, fold, merge
        self.parts: Parts = find_parts(model, rank)
        self.units = {unit.index for unit in model.layout.of_kind("block")}
        if fold and any(model.engine.homes[i].dtype == PACKED for i in self.units):
            raise UserError("wire: weights that are packed are not rounded anew by zo.rank; set zo.fold=false")
        device = model.device
        self.now = torch.zeros(self.parts.numel, device=device)
        wide = -(-self.parts.numel // ALIGN) * ALIGN  # aligns every look for wide memory accesses
        self.looks = torch.empty(2 * pairs, wide, device=device)[:, : self.parts.numel]
        self.kept = Kept(self.parts, model.dtype, None if fold else fold_periods, fold_error, guide is not None)
        self.fold: Fold | None = None
        self.steps, self.v = 0, self.draw_v(0)  # number of steps done; v of the period that they lead to
        self.changed = torch.zeros((), dtype=torch.int64, device=device)
        self.guide = None if guide is None else Guide(self, guide)
        self.guided: int | None = None  # the period that V was found for (guide.py)
        self.share: Share | None = None  # None: the unperturbed weights
        self.shares: dict[int, Share] = {}  # by pass, during a step
        self.differ: set[int] = set()  # passes whose looks have different rows by now
        self.spines: torch.Tensor | None = None
        self.by_layer = {id(matrix.layer): i for i, matrix in enumerate(self.parts.matrices)}
        self.readers = readers(self.parts.matrices)
        self.waiting = waiting(model.blocks, self.parts.matrices)
        self.leaders: dict[int, int] = {}  # by the start of a group's v: the layer that is called first
        self.by_owner: dict[int, list[Vector]] = {}  # vectors of modules without a matrix, by module
        for vector in self.parts.vectors:
            vector_at(self.now, vector).copy_(model.home(vector.tensor))
            if id(vector.owner) not in self.by_layer:
                self.by_owner.setdefault(id(vector.owner), []).append(vector)
        self.in_spine: dict[int, dict[str, FlatTensor]] = {}  # by module and name of the parameter
        self._install(model)
        model.factors = self

    def _install(self, model: Model) -> None:
        """Makes the module's forward ask for the factors: in linear layers, in a ReLU whose output such a layer reads,
        in blocks before the first trained weight, and in other modules with vectors of their own."""
        owners = self._find_owners(model)
        plain = not model.classifies and not model.head.transforms
        self.together = plain and not any(any(owner.children()) for owner in owners)
        install(model, [m.layer for m in self.parts.matrices])
        relus = [found for block in model.blocks if (found := relu_reader(block)) and id(found[1]) in self.by_layer]
        for index in (self.by_layer[id(layer)] for _, layer in relus):
            self.readers.setdefault(index, self.parts.matrices[index].v)
        install_relu(model, relus)
        install_ends(model, model.blocks)
        self.trained_blocks = {id(b) for b in model.blocks if any(p.requires_grad for p in b.parameters())}
        if model.blocks and id(model.blocks[0]) not in self.trained_blocks:
            install_once(model, model.blocks)
        install_by_look(model, owners if self.together else [m for m in owners if id(m) in self.by_owner], self)

    def _find_owners(self, model: Model) -> list[nn.Module]:
        """Modules other than layers with factors that have vectors of their own: in a block, or in the spine."""
        spine = {id(t.param): t for t in model.layout.spine.tensors}
        inside = model.module if model.classifies else model.head.decoder
        others = [m for m in inside.modules() if id(m) not in self.by_layer]
        for owner in others:
            if own := {name: spine[id(p)] for name, p in owner._parameters.items() if id(p) in spine}:
                self.in_spine[id(owner)] = own
        return [m for m in others if id(m) in self.in_spine.keys() | self.by_owner.keys()]

    # -- noise and updates -----------------------------------------------------------------------------------------

    def draw_v(self, period: int) -> torch.Tensor:
        """V / sqrt(r) of all layers, in the dtype of compute."""
        where = {"offset": self.parts.v_start, "step": period, "device": self.model.device}
        return ops.draw_noise(self.parts.v_numel, **where, **self.noise).mul_(self.rank**-0.5).to(self.model.dtype)

    @property
    def period(self) -> int:
        """The number of the period that the next step belongs to."""
        return self.steps // self.refresh

    def take_v(self, v: torch.Tensor, period: int) -> None:
        """Sets the V of the present period, in place: CUDA graphs use its address."""
        self.v.copy_(v)
        self.guided = period

    @contextmanager
    def another_v(self, period: int) -> Iterator[None]:
        """A context in which passes use the V of another period, for a search that changes nothing."""
        self.v.copy_(self.draw_v(period))
        try:
            yield
        finally:
            self.v.copy_(self.draw_v(self.period))

    def perturb(self, perturbations: list[dict[str, Any]]) -> None:
        """Computes the looks of a step: for each pair its step, eps, direction, and what is beside it."""
        if self.model.factors is not self:
            raise UserError(
                "zo.rank: another method was made on this model since, and what the factors had learned was merged "
                "into its weights: the layers do not see them any more. Make a new ZO to train on"
            )
        for p, how in enumerate(perturbations):
            moved = ops.ZOStep(self.parts.start, **self.noise, **how)
            ops.zo_flat_(self.now, self.looks[2 * p], self.looks[2 * p + 1], moved)

    def update(self, pending: Pending) -> None:
        """Applies the update of a finished step."""
        assert self.fold is None or not self.fold.left, "a fold of the period before is not done"
        how = {"coef": pending.coef, "update_step": pending.step, "changed": self.changed.zero_()}
        ops.zo_flat_(self.now, None, None, ops.ZOStep(self.parts.start, **self.noise, **how))
        self.steps = pending.step + 1
        if self.steps % self.refresh == 0:
            self._end_period()

    def _end_period(self) -> None:
        a = self.now[: self.parts.a_numel]
        if self.folds:
            self.fold = Fold(a.clone(), self.v.clone(), self.steps, set(self.units))
        else:
            self.kept.add(a, self.v)
            self.kept.end_period(self.steps, self.refresh)
        a.zero_()
        self.v.copy_(self.draw_v(self.period))  # in place: CUDA graphs use its address

    # -- weights at home -------------------------------------------------------------------------------------------

    def owes(self, unit: Unit) -> bool:
        """Whether the unit's home lacks a fold."""
        return self.fold is not None and unit.index in self.fold.left

    @property
    def is_steady(self) -> bool:
        """Whether a step changes no weight of blocks."""
        return self.fold is None or not self.fold.left

    def is_behind(self, unit: Unit) -> bool:
        """Whether the unit's home lacks a fold, or the current values of vectors."""
        return self.owes(unit) or (self.steps > 0 and next(self.parts.vectors_of(unit), None) is not None)

    def arrive(self, unit: Unit, w: torch.Tensor, awaited: bool) -> bool:
        """Called with a unit that is on the device as at home. Applies the folds that it lacks; True: it must be
        written back. awaited: a checkpoint needs its home, so its vectors are updated too."""
        owed = self.owes(unit)
        if owed:
            merge.fold_into(self, unit, w, self.fold)
            self.fold.left.discard(unit.index)
        if (owed or awaited) and w.dtype != PACKED:
            for vector in self.parts.vectors_of(unit):
                view(w, vector.tensor, unit.start).copy_(vector_at(self.now, vector))
                owed = True
        return owed

    def as_saved(self, tensor: FlatTensor, home: torch.Tensor, merged: bool = True) -> torch.Tensor:
        """A parameter with everything that was learned, rounded once; `home` itself if nothing is to be added.
        merged=False: matrices as they are at home."""
        return merge.as_saved(self, tensor, home, merged)

    def bring_home(self) -> None:
        """Applies all remaining folds, and updates the homes of units that a checkpoint waits for."""
        merge.bring_home(self)

    def settle(self) -> None:
        """Merges everything that was learned into the weights at home, also within a period, and ends."""
        merge.settle(self)

    def write_files(self, path: Path) -> None:
        """Adds the factors to a model directory, if they are not merged into its weights."""
        if not self.merges:
            write_factors(self, path)

    def learned(self, index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(a, v) of a matrix that its home lacks, oldest first, after all folds are done."""
        matrix, learned = self.parts.matrices[index], []
        if self.kept:
            learned.append(self.kept.learned(index))
        if self.steps % self.refresh:
            learned.append((self.rows(self.now, matrix.a), self.rows(self.v, matrix.v).float()))
        return learned

    def sample(self, tensor: FlatTensor) -> torch.Tensor | None:
        """What is currently learned of a tensor beside its home; None if it is trained at home."""
        places = {id(m.tensor): m.a for m in self.parts.matrices} | {id(v.tensor): v.at for v in self.parts.vectors}
        at = places.get(id(tensor))
        if at is None:
            return None
        index = next((i for i, m in enumerate(self.parts.matrices) if m.tensor is tensor), None)
        if index is None or not self.kept:
            return self.now[at]
        return self.now[at] + self.kept.here[index][0].float().sum(0).repeat(self.rank)

    def rows(self, flat: torch.Tensor, at: slice) -> torch.Tensor:
        """[r, .]: the part of a matrix in the array of all A, or of all V."""
        return flat[at].view(self.rank, -1)

    def describe(self) -> list[str]:
        """Lines for the start block."""
        parts, end = self.parts, "folded into the weights" if self.folds else "kept beside weights that never change"
        size = (4 * (self.now.numel() + self.looks.numel()) + self.v.nbytes) / 2**20
        what = f"low rank: z = U V^T / sqrt({self.rank}) in {len(parts.matrices)} linear layers"
        learned = f"learned in {parts.numel:,} numbers ({size:.1f} MiB with V and looks)"
        if self.guide is not None:
            what += (
                f", V from the errors of {self.guide.rows:,} rows (all, if there are fewer) at the start of each period"
            )
        if not self.folds and (kept := self.kept).every is not None:
            end += f"; after every {kept.every} periods in as few terms as lose {kept.most:g} of its norm at most"
        when = f"every {self.refresh} steps a new V, and what was learned is {end}"
        if self.guide is None:
            when += f"; the best rate is about {rate_share(self.rank):.2f} of that of dense directions, or less"
        passes = "one for all looks at a batch" if self.together else "one for each look at a batch"
        return [f"{what}, {learned}; {when}", f"passes: {passes}"]

    # -- interface to the layers (model/forward/low_rank.py) -------------------------------------------------------

    @contextmanager
    def carried(self, shares: dict[int, Share], spines: torch.Tensor) -> Iterator[None]:
        """A context in which passes carry looks. spines: [pairs, 2, spine]."""
        self.differ = set()
        self.shares, self.spines = shares, spines.flatten(0, 1)  # of no numbers, where the model has no final norm
        try:
            yield
        finally:
            self.shares, self.spines = {}, None

    @contextmanager
    def seen_at(self, look: int) -> Iterator[None]:
        """A context in which every pass uses the weights at one look."""
        self.share = Share(look, 1)
        try:
            yield
        finally:
            self.share = None

    @property
    def running(self) -> Share | None:
        if not self.shares:
            return self.share
        return self.shares[self.model.conductor.current.index]

    @property
    def parted(self) -> bool:
        return self.model.conductor.current.index in self.differ

    def part(self) -> None:
        self.differ.add(self.model.conductor.current.index)

    @contextmanager
    def one_look(self) -> Iterator[None]:
        index, share = self.model.conductor.current.index, self.running
        self.shares[index] = Share(share.first, 1, share.rows // share.count, share.tokens // share.count)
        try:
            yield
        finally:
            self.shares[index] = share

    def _at_looks(self) -> torch.Tensor:
        """[L, n] the factors at the looks of the running pass."""
        share = self.running
        return self.now[None] if share is None else self.looks[share.first : share.first + share.count]

    def graph_key(self) -> tuple | None:
        memory = (self.looks, self.v, self.spines)
        if not self.shares or not self.folds or self.spines is None:
            return None
        return self.running, *(tensor.data_ptr() for tensor in memory)

    def added_to(self, layer: torch.nn.Module) -> Added | None:
        """What the layer's product adds."""
        index = self.by_layer.get(id(layer))
        if index is None:
            return None
        matrix, flat, bias = self.parts.matrices[index], self._at_looks(), None
        if isinstance(matrix.bias, slice):
            bias = flat[:, matrix.bias]
        elif matrix.bias is not None and self.spines is not None:
            share, begin = self.running, matrix.bias.start - self.model.layout.spine.start
            bias = self.spines[share.first : share.first + share.count, begin : begin + matrix.outputs]
        elif getattr(layer, "bias", None) is not None:
            bias = layer.bias[None].expand(flat.shape[0], -1)
        earlier = self.kept.rooms[index] if self.kept else None
        b_LrO = flat[:, matrix.a].unflatten(1, (self.rank, matrix.outputs))
        how = matrix.transposed, self._readers(index), index in self.waiting
        return Added(self.rows(self.v, matrix.v), b_LrO, bias, earlier, *how)

    def _readers(self, index: int) -> Readers | None:
        """The layers that may read the input of this one, in the passes of a step."""
        at = self.readers.get(index) if self.shares else None
        if at is None:
            return None
        matrix, leads = self.parts.matrices[index], self.leaders.setdefault(at.start, index) == index
        column = (matrix.v.start - at.start) // matrix.inputs
        return Readers(self.v[at].view(-1, matrix.inputs), column, leads, self.running)

    def see(self, layer: torch.nn.Module, x: torch.Tensor) -> None:
        if self.guide is not None and self.guide.inputs is not None:
            self.guide.inputs.see(self.by_layer[id(layer)], x)

    def point(self, module: torch.nn.Module, look: int | None, several: bool) -> None:
        flat = self.now if look is None else self.looks[look]
        for vector in self.by_owner.get(id(module), ()):
            vector.tensor.param.data = vector_at(flat, vector).to(self.model.dtype)
        if several:
            for tensor in self.in_spine.get(id(module), {}).values():
                tensor.param.data = view(self.spines[look], tensor, self.model.layout.spine.start)

    def shapes_of(self, module: torch.nn.Module) -> dict[str, torch.Size]:
        inside = {vector.name: vector.tensor for vector in self.by_owner.get(id(module), ())}
        own = inside | self.in_spine.get(id(module), {})
        return {name: own[name].shape if name in own else p.shape for name, p in _parameters(module)}

    def vectors_at_looks(self, module: torch.nn.Module) -> dict[str, torch.Tensor] | None:
        share, start = self.running, self.model.layout.spine.start
        at = slice(share.first, share.first + share.count)
        found = {v.name: self.looks[at, v.at].to(self.model.dtype) for v in self.by_owner.get(id(module), ())}
        for name, tensor in self.in_spine.get(id(module), {}).items():
            found[name] = self.spines[at, tensor.start - start : tensor.stop - start]
        return found if all(name in found for name, _ in _parameters(module)) else None


def _parameters(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The module's own parameters; an absent one, such as a bias, is None there."""
    return [(name, p) for name, p in module._parameters.items() if p is not None]
