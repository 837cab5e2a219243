"""The update of a zeroth-order step: known when the step ends, applied at the next visit of each unit.

    w <- round(w - lr (sum_i c_i z_i + weight_decay w))        coef = [lr, c_1 .. c_q], z of the step it is from

coef depends on the losses, which are known only after the last unit. Applying the update then would move every unit
over the link once more; so it is deferred, and a unit gets it on the first of these occasions:

    the next step       fused with the perturbation, one pass over w: `perturb`
    the end of a step   for units that no pass visits, such as the table of an untied model: `apply_to_rest`; experts
                        without tokens wait until they receive one
    a flush             when the weights are read

An update is elementwise, and its noise is a function of (seed, step, element): it can be recomputed at any time. So a
streamed unit need not be written back after every step (write_back.py). A unit that is not written back has *deferred*
updates: when it arrives it gets all of them, oldest first, with the same bits as if it had been written back each time.

    waiting          the updates that some home lacks, oldest first (4 (1 + q) bytes each)
    at_home[unit]    how many of these the home of a unit has; it lacks the others

No update is applied twice, even if a step is aborted between units. A replay of a run from its journal does the same:
all updates on one unit, then all on the next.
Frozen tensors are left out: a unit is cut into trained and frozen spans and, with weight decay, into spans that decay
and spans that do not (weight_decay.py). A packed unit (8 bit) that is one span is updated in packed
form (ops/zo/packed.py); any other is unpacked, updated and packed.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.zo.traits import ZOConfig
from keyhole.methods.zo.write_back import SHARED_EVERY, WriteBack
from keyhole.model.model import Model
from keyhole.model.structure.layout import Unit
from keyhole.model.weights.format import PACKED, Codec
from keyhole.ops.arguments import Count, Scalar


@dataclass
class Pending:
    """An update that is known but not yet applied: [lr, c_1 .. c_q] on the device, and the step of its noise."""

    coef: torch.Tensor
    step: Count  # a number; during CUDA graph capture, a tensor on the device
    weight_decay: float = 0.0

    def added_to(self, how: ops.ZOStep, decays: bool = True, changed: Scalar = None) -> ops.ZOStep:
        """The settings of an op that makes this update, and what `how` says."""
        decay = self.weight_decay if decays else 0.0
        return replace(how, coef=self.coef, update_step=self.step, weight_decay=decay, changed=changed)


@dataclass
class Span:
    """[begin, end) of a unit, which an update treats alike."""

    begin: int
    end: int
    trained: bool = True
    decays: bool = True


def cut_unit(unit: Unit, spared: frozenset[int] = frozenset()) -> list[Span]:
    """The spans of a unit; spared: ids of the parameters that do not decay. Padding between aligned tensors is in no
    span: it stays 0, as after loading, and is not part of a checkpoint."""
    spans: list[Span] = []
    for tensor in unit.tensors:
        begin, end = max(0, tensor.start - unit.start), min(unit.numel, tensor.stop - unit.start)
        span = Span(begin, end, tensor.param.requires_grad, id(tensor.param) not in spared)
        if spans and replace(span, begin=spans[-1].begin, end=begin) == spans[-1]:
            spans[-1].end = end
        else:
            spans.append(span)
    return spans


class Update:
    """The updates that a model's homes lack. spared: ids of the parameters that do not decay; elsewhere: units that
    other code updates (low_rank/)."""

    def __init__(
        self, model: Model, own: ZOConfig, spared: frozenset[int] = frozenset(), elsewhere: frozenset[int] = frozenset()
    ) -> None:
        self.model: Model = weakref.proxy(model)  # which holds this object
        self.noise = ops.ZOStep(0, own.seed, cast(str, own.distribution), rounding=own.rounding)
        self.spared, self.elsewhere = spared, elsewhere
        self.codec = cast(Codec, model.formats.codec)  # read for packed units only, which have one
        self.waiting: list[Pending] = []
        self.at_home = [0] * len(model.layout.units)
        self.write_back = WriteBack(model, own.write_back_every if own.deferred_update else 1)
        self.changed = torch.zeros((), dtype=torch.int64, device=model.device)  # weights changed by the last update
        self.own_changed: torch.Tensor | None = None  # the same for the shared units that this rank updates
        self.counted: set[int] = set()  # units that are already counted in it
        self.own_units = [unit for unit in model.layout.units if unit.index not in elsewhere]
        self.trained = [cut_unit(unit) for unit in model.layout.units]
        self.decaying = [cut_unit(unit, spared) for unit in model.layout.units]
        self.unpacked = torch.empty(0, device=model.device)
        spans = [span for unit in self.own_units for span in self.trained[unit.index] if span.trained]
        self.trained_numel = sum(span.end - span.begin for span in spans)
        if not self.trained_numel and not elsewhere:
            raise UserError("every parameter is frozen: there is nothing to train")

    @property
    def pending(self) -> Pending | None:
        """The last update, while some home lacks it."""
        return self.waiting[-1] if self.waiting else None

    def defer(self, pending: Pending) -> None:
        """Adds an update that no unit has had."""
        self._forget()
        self.waiting.append(pending)
        self.counted = set()

    def begin(self) -> None:
        """Called at the beginning of a sweep. If the sweep before was aborted, the units that it did not reach are
        updated first: rows of the table are updated on the fly (directions.py), all or none."""
        self.write_back.begin()
        strict = [unit for unit in self.own_units if unit.index not in self.write_back.patient]
        shared = self.model.engine.shared and len(self.waiting) >= SHARED_EVERY
        if shared or any(len(self.deferred(unit)) != 1 for unit in strict):
            self.flush()
        if self.waiting and not self.counted:
            self.changed.zero_()

    def deferred(self, unit: Unit) -> list[Pending]:
        """The updates that the unit's home lacks, oldest first."""
        return self.waiting[self.at_home[unit.index] :]

    def perturb(
        self, unit: Unit, w: torch.Tensor, copies: Sequence[torch.Tensor], how: ops.ZOStep, arrived: bool
    ) -> None:
        """Writes two perturbed copies. A unit that has just arrived gets its deferred updates, the last in this pass
        over it, and is written back if it is due. For a packed unit, the packed values are perturbed."""
        deferred = self.deferred(unit) if arrived else []
        at_once = bool(deferred) and not self._in_parts(unit, w, deferred[-1])
        for pending in deferred[:-1] if at_once else deferred:
            self.apply(unit, w, pending)
        flat = self._decoded(unit, w) if self._in_parts(unit, w) else w
        self._op(unit, flat, how, deferred[-1] if at_once else None, copies)
        if deferred and self.write_back.is_due(unit, cast(int, deferred[-1].step)):
            self._go_home(unit)

    def apply(self, unit: Unit, w: torch.Tensor, pending: Pending) -> None:
        """Applies an update to a unit that is on the device, plain or packed. (For a unit that is unpacked and packed,
        `changed` also counts changes that packing then loses.)"""
        if not self._in_parts(unit, w, pending):
            return self._op(unit, w, self.noise, pending)
        self._op(unit, unpacked := self._decoded(unit, w), self.noise, pending)
        where = {"offset": unit.start, "seed": self.noise.seed, "step": pending.step}
        self.codec.encode_(unpacked, w, **where, rounding=self.noise.rounding)

    def _in_parts(self, unit: Unit, w: torch.Tensor, pending: Pending | None = None) -> bool:
        """Whether a packed unit has several spans, or padding in it, and so must be unpacked."""
        return w.dtype == PACKED and self._spans(unit, pending) != [Span(0, unit.numel)]

    def _spans(self, unit: Unit, pending: Pending | None) -> list[Span]:
        return (self.decaying if pending is not None and pending.weight_decay else self.trained)[unit.index]

    def _decoded(self, unit: Unit, w: torch.Tensor) -> torch.Tensor:
        if unit.numel > self.unpacked.numel():
            self.unpacked = torch.empty(unit.numel, device=w.device)
        self.codec.decode(w, self.unpacked[: unit.numel])
        return self.unpacked[: unit.numel]

    def _op(
        self,
        unit: Unit,
        w: torch.Tensor,
        how: ops.ZOStep,
        pending: Pending | None,
        copies: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Updates a unit on the device, if an update is given, and then writes perturbed copies, if they are."""
        if pending is not None:
            counter = None  # of weights that the update changes: only for the last one, once per unit
            if pending is self.pending and unit.index not in self.counted:
                self.counted.add(unit.index)
                own = self.own_changed is not None and unit.index in self.model.engine.shared
                counter = self.own_changed if own else self.changed
            how = pending.added_to(how, changed=counter)
        if w.dtype == PACKED:
            return self.codec.zo_(w, unit.numel, *(copies or (None, None)), replace(how, offset=unit.start))
        for span in self._spans(unit, pending):
            part = slice(span.begin, span.end)
            plus, minus = (None, None) if copies is None else (copies[0][part], copies[1][part])
            if span.trained:
                decay = how.weight_decay if span.decays else 0.0
                of_span = replace(how, offset=unit.start + span.begin, weight_decay=decay)
                ops.zo_flat_(w[part], plus, minus, of_span)
            elif plus is not None and minus is not None:
                plus.copy_(w[part])
                minus.copy_(w[part])

    def apply_to_rest(self, everywhere: bool = False) -> None:
        """At the end of a sweep: applies deferred updates to units that no pass has visited, or to all."""
        engine = self.model.engine
        for unit in self.own_units:
            deferred = self.deferred(unit)
            due = deferred and self.write_back.is_due(unit, cast(int, deferred[-1].step), len(deferred))
            if not deferred or not (everywhere or due):
                continue
            if not self._must_go(unit) or unit.index in self.model.homes.foreign:
                self.at_home[unit.index] = len(self.waiting)
                continue
            w = engine.acquire(unit.index)
            for pending in deferred:
                self.apply(unit, w, pending)
            self._go_home(unit)
            engine.release(unit.index)

    def _go_home(self, unit: Unit) -> None:
        """Writes back a unit that has had all updates; not needed if they changed nothing (it is frozen)."""
        if self._must_go(unit):
            self.model.engine.commit(unit.index)
        self.at_home[unit.index] = len(self.waiting)

    def _must_go(self, unit: Unit) -> bool:
        """Whether updates change the unit, or a checkpoint waits for it."""
        return any(span.trained for span in self.trained[unit.index]) or self.write_back.is_awaited(unit)

    def _forget(self) -> None:
        """Drops updates that every home has."""
        had = min(self.at_home[unit.index] for unit in self.own_units)
        self.waiting = self.waiting[had:]
        self.at_home = [0 if unit in self.elsewhere else count - had for unit, count in enumerate(self.at_home)]

    @torch.no_grad()
    def flush(self) -> None:
        """Applies all deferred updates at home; none is waiting afterwards. Of the units that the ranks of one machine
        share, each rank updates its part. `changed` then counts the parts of all ranks of this machine: every unit
        once, however many machines have a copy."""
        if not self.waiting:
            return
        if not self.counted:
            self.changed.zero_()
        with self.model.rewriting_shared(), self.model.sweep("flush", experts=True):
            self.own_changed = torch.zeros_like(self.changed)
            self.apply_to_rest(everywhere=True)
        if self.model.engine.shared:
            ranks = self.model.ranks
            self.changed += ranks.gather(self.own_changed)[list(ranks.neighbours)].sum()
            self.counted |= self.model.engine.shared
        self.own_changed = None
        self._forget()

    def replay(self, updates: list[Pending]) -> None:
        """Applies known updates, unit by unit. `changed` counts the last."""
        assert not self.waiting, "flush first"
        self.waiting, self.at_home, self.counted = list(updates), [0] * len(self.at_home), set()
        self.flush()

    # -- a recorded step (recorded_step.py) ----------------------------------------------------------------------------

    @property
    def is_usual(self) -> bool:
        """Whether every unit lacks exactly the last update."""
        return len(self.waiting) == 1 and not any(self.at_home) and not self.counted

    @contextmanager
    def trial(self, coef: torch.Tensor, step: torch.Tensor) -> Iterator[None]:
        """A context for a sweep that is not counted: it begins as the one before it, with the numbers of the update in
        static memory."""
        books, pending = (self.at_home, self.counted), self.waiting[-1]
        static = replace(pending, coef=coef, step=step)
        self.at_home, self.counted, self.waiting[-1] = [0] * len(self.at_home), set(), static
        try:
            yield
        finally:
            (self.at_home, self.counted), self.waiting[-1] = books, pending

    def replayed(self, counted: set[int]) -> None:
        """After a sweep whose kernels were replayed. counted: the units whose changes they count."""
        self.at_home, self.counted = [1] * len(self.at_home), set(counted)
