"""The factors of low-rank directions: perturbed for a step, updated after it, set aside at the end of a period.

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

    folded    W <- round(W + A V_k^T / sqrt(r)), once per period (layers.py): it rounds less often than dense steps, by
              a factor of `refresh`
    kept      as r more terms beside W, which never changes and so may be frozen in any format: k r terms after k
              periods, by which all passes multiply. A run of many steps takes longer periods (zo.refresh)

Kept terms are float32 in host memory as they were learned; passes use a device copy in the dtype of compute. Their
places are the first rows of a *room* for each matrix, whose other rows are zeros and add nothing. If it is full, one
for STEP more terms takes its place: so passes read the same addresses for several periods, and a CUDA graph
(../recorded_step.py) is valid as long as `version` is the same.

A checkpoint holds the weights as they are at home, after the last fold, and what was learned since: `factors` (all A of
the period, and the vectors), and for kept periods `kept`, their A one below the other. V is drawn again (with zo.guide
it cannot be, and is saved: `directions`, `kept_v`). So a run resumes in the middle of a period, to the bit, and a
checkpoint takes 4 n bytes more (OPT-13B, rank 2: 22 MB). If all factors are kept, blocks never change, and a checkpoint
is *light*: it holds no model, but beside the factors the homes of other units (common, table, head) in which something
is trained, and the run resumes from the original model.

Bytes, for n numbers in all A and vectors, m in all V, L looks, b bytes per number in compute:
4 n + 4 L n + b m; 4 n + b m more during a fold; for each kept period b (n + m), and 4 n on the host.
"""

import weakref
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.nn.functional import pad

from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.base import Saved, State
from keyhole.methods.zo.low_rank.parts import Parts, find_parts, vector_at
from keyhole.methods.zo.traits import ZOConfig
from keyhole.methods.zo.update import Pending
from keyhole.model.model import Model
from keyhole.model.structure.layout import ALIGN
from keyhole.model.weights.format import PACKED

Rows = tuple[torch.Tensor, torch.Tensor]  # a [K, O], v [K, I]
STEP = 16  # terms by which a room grows; products are fast with multiples of 8


@dataclass(frozen=True)
class Fold:
    """What a period has learned, to be added to the weights. step: for its rounding bits."""

    a: torch.Tensor
    v: torch.Tensor
    step: int


class Factors:
    """The factors of one model, as numbers."""

    def __init__(self, model: Model, own: ZOConfig, pairs: int) -> None:
        """own: filled, with a rank. pairs: the most pairs of looks of a step."""
        assert own.rank is not None and own.distribution is not None
        self.model: Model = weakref.proxy(model)  # which holds this object, by its layers
        self.noise: dict[str, Any] = {"seed": own.seed, "distribution": own.distribution}
        self.rank, self.refresh, self.folds, self.rounding = own.rank, own.refresh, own.fold, own.rounding
        self.guided = own.guide is not None  # then V cannot be drawn again
        self.parts: Parts = find_parts(model, own.rank)
        self.units = {unit.index for unit in model.layout.of_kind("block")}
        if own.fold and any(model.engine.homes[i].dtype == PACKED for i in self.units):
            raise UserError("wire: weights that are packed are not rounded anew by zo.rank; set zo.fold=false")
        device = model.device
        self.now = torch.zeros(self.parts.numel, device=device)
        wide = -(-self.parts.numel // ALIGN) * ALIGN  # aligns every look for wide memory accesses
        self.looks = torch.empty(2 * pairs, wide, device=device)[:, : self.parts.numel]
        self.steps, self.v = 0, self.draw_v(0)  # number of steps done; v of the period that they lead to
        self.changed = torch.zeros((), dtype=torch.int64, device=device)
        self.found_for: int | None = None  # the period that V was found for (guide.py)
        self.version = 0  # of the rooms' addresses
        self._keep_nothing()
        for vector in self.parts.vectors:
            vector_at(self.now, vector).copy_(model.home(vector.tensor))

    def draw_v(self, period: int) -> torch.Tensor:
        """V / sqrt(r) of all layers, in the dtype of compute."""
        parts, device = self.parts, self.model.device
        v = ops.draw_noise(parts.v_numel, offset=parts.v_start, step=period, device=device, **self.noise)
        return v.mul_(self.rank**-0.5).to(self.model.dtype)

    @property
    def period(self) -> int:
        """The number of the period that the next step belongs to."""
        return self.steps // self.refresh

    def take_v(self, v: torch.Tensor) -> None:
        """Sets the V that was found for the present period, in place: CUDA graphs use its address."""
        self.v.copy_(v)
        self.found_for = self.period

    def perturb(self, number: int, how: ops.ZOStep) -> None:
        """Computes the looks of a pair. how: its step, eps, direction, and what is beside it."""
        plus, minus = self.looks[2 * number : 2 * number + 2]
        ops.zo_flat_(self.now, plus, minus, replace(how, offset=self.parts.start))

    def update(self, pending: Pending) -> list[Fold]:
        """Applies the update of a finished step. Returns the period that it ends, if that is to be folded."""
        how = pending.added_to(ops.ZOStep(self.parts.start, **self.noise), changed=self.changed.zero_())
        ops.zo_flat_(self.now, None, None, how)
        self.steps = cast(int, pending.step) + 1
        if self.steps % self.refresh:
            return []
        a, v = self.now[: self.parts.a_numel].clone(), self.v.clone()
        if not self.folds:
            self._keep(a, v)
        self.now[: self.parts.a_numel].zero_()
        self.v.copy_(self.draw_v(self.period))  # in place: CUDA graphs use its address
        return [Fold(a, v, self.steps)] if self.folds else []

    # -- the terms of earlier periods ------------------------------------------------------------------------------

    def _keep_nothing(self) -> None:
        empty = self.v.new_empty(0)
        self.kept: list[torch.Tensor] = []  # all A of each period, in float32 on the host
        self.kept_v: list[torch.Tensor] = []  # and all V, if they were found
        self.rooms: list[Rows] = [(empty.view(0, m.outputs), empty.view(0, m.inputs)) for m in self.parts.matrices]

    def _keep(self, a: torch.Tensor, v: torch.Tensor) -> None:
        """Adds a period: all its A in float32, and V as it was used."""
        begin, end = len(self.kept) * self.rank, (len(self.kept) + 1) * self.rank
        self.kept.append(a.to("cpu", torch.float32, copy=True))
        if self.guided:
            self.kept_v.append(v.to("cpu", copy=True))
        rows = len(self.rooms[0][0])
        grows, more = end > rows, (0, 0, 0, room_for(end) - rows)
        self.version += grows
        for i, matrix in enumerate(self.parts.matrices):
            if grows:  # one matrix at a time, so that little is held twice
                self.rooms[i] = pad(self.rooms[i][0], more), pad(self.rooms[i][1], more)
            self.rooms[i][0][begin:end] = self.rows(a, matrix.a)
            self.rooms[i][1][begin:end] = self.rows(v, matrix.v)

    # -- weights at home -------------------------------------------------------------------------------------------

    def learned(self, index: int) -> Rows | None:
        """All terms of a matrix that its home lacks, oldest first, in float32 on the device; None if it lacks none."""
        matrix, a, v = self.parts.matrices[index], [], []
        if self.kept:
            a += [self.rows(period, matrix.a).to(self.now.device) for period in self.kept]
            v.append(self.rooms[index][1][: len(self.kept) * self.rank].float())
        if self.steps % self.refresh:
            a.append(self.rows(self.now, matrix.a))
            v.append(self.rows(self.v, matrix.v).float())
        return (torch.cat(a), torch.cat(v)) if a else None

    def rows(self, flat: torch.Tensor, at: slice) -> torch.Tensor:
        """[r, .]: the part of a matrix in the array of all A, or of all V."""
        return flat[at].view(self.rank, -1)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Tensors for a checkpoint."""
        state: State = {"factors": self.now}
        if self.found_for == self.period:
            state["directions"] = self.v
        if not self.folds:
            state |= {"light": True} | {f"home.{i}": self.model.engine.homes[i] for i in self._changing()}
        state |= {"kept": torch.stack(self.kept)} if self.kept else {}
        return state | ({"kept_v": torch.stack(self.kept_v)} if self.kept_v else {})

    def load(self, state: Saved, steps: int) -> None:
        """Loads the tensors of a checkpoint after `steps` steps, and the weights at home that a light one contains."""
        if "factors" not in state or state["factors"].shape != self.now.shape:
            raise UserError("zo.rank: the checkpoint has no factors of this rank; zo.rank must be as it was")
        self.now.copy_(state["factors"])
        if not self.folds:
            self._take_homes(state)
        self.steps = steps
        self._keep_nothing()
        self.version += 1
        periods = state["kept"] if "kept" in state else ()
        if len(periods) > self.period:
            raise ValueError(f"{len(periods)} kept periods after {steps} steps, of {self.refresh} steps each")
        for number, a in enumerate(periods):
            v = state["kept_v"][number] if "kept_v" in state else self.draw_v(self.period - len(periods) + number)
            self._keep(a.to(self.now), v.to(self.v))
        self.v.copy_(state["directions"] if "directions" in state else self.draw_v(self.period))
        self.found_for = self.period if "directions" in state else None

    def check_guide(self, state: Saved) -> None:
        """Refuses a state whose V were found from data, if this run draws V, and the reverse: within a period the
        factors would be multiplied by another V, and V of kept periods would be lost."""
        found = "directions" in state or "kept_v" in state
        drawn = not found and ("kept" in state or int(state["step_count"]) % self.refresh > 0)
        if (found and not self.guided) or (drawn and self.guided):
            was = "found from data" if found else "random"
            raise UserError(f"zo.guide: the directions of the state are {was}; zo.guide must be as it was")

    def _changing(self) -> list[int]:
        """The units outside of blocks that may differ from the original model: something in them is trained, or a head
        that was drawn."""
        drawn = {id(tensor) for tensor in self.model.drawn_head}
        others = [unit for unit in self.model.layout.units if unit.index not in self.units]
        return [u.index for u in others if any(t.param.requires_grad or id(t) in drawn for t in u.tensors)]

    def _take_homes(self, state: Saved) -> None:
        """Copies the saved homes, in the order of units: their numbers depend on how many units a memory budget cuts
        the blocks between them into. ValueError if they are of other units."""
        names = sorted((name for name in state if name.startswith("home.")), key=lambda name: int(name[len("home.") :]))
        found = [state[name] for name in names]
        changing = [self.model.engine.homes[i] for i in self._changing()]
        if [home.shape for home in found] != [home.shape for home in changing]:
            raise ValueError(f"{len(found)} saved units for {len(changing)} of this model, or of other sizes")
        for home, kept in zip(changing, found, strict=True):
            home.copy_(kept)
        self.model.engine.invalidate()


def room_for(terms: int) -> int:
    """The number of rows of a room."""
    return -(-terms // STEP) * STEP
