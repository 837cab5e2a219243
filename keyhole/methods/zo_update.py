"""The update of a zeroth-order step: known when the step ends, applied when its units are next visited.

    w <- round(w - lr (1/q sum_i g_i z_i + weight_decay w))        coef = [lr, g_1/q .. g_q/q], z of the step it is from

coef needs the losses, and they are known only when every unit has been passed. Applying the update then would be one
more trip of every unit over the link; so it waits here, and a unit gets it on the first of these occasions:

    the next step       fused with the perturbation, one pass over w: `perturb`
    the end of a step   for units that no pass visits, such as the table of an untied model: `apply_to_rest`
    a flush             when someone wants to see the weights

`visited` is the set of units that have had it: none gets it twice, also after a step that broke off.
Frozen tensors are left out: a unit is cut into spans that are trained and spans that are not. A packed unit (8 bit)
that is one trained span is updated as it is (ops/zo_packed.py); any other is unpacked, updated and packed.

An update is elementwise, and its noise is a function of (seed, step, element): replaying a run from its journal is all
updates on one unit, then all on the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.model.layout import Unit
from keyhole.model.model import Model
from keyhole.offload.wire import PACKED


@dataclass
class Pending:
    """An update that is known but not applied yet: [lr, g_1/q .. g_q/q] on the device, and the step of its noise."""

    coef: torch.Tensor
    step: int


class Update:
    """The pending update of a model's weights, if there is one. noise: seed, distribution; decay: and rounding."""

    def __init__(self, model: Model, noise: dict[str, Any], decay: dict[str, Any]) -> None:
        self.model, self.noise, self.decay = model, noise, decay
        self.pending: Pending | None = None
        self.visited: set[int] = set()
        self.changed = torch.zeros((), dtype=torch.int64, device=model.device)  # weights moved by the last update
        self.trained = [trained_spans(unit) for unit in model.layout.units]
        packed = [u for u in model.layout.units if model.engine.homes[u.index].dtype == PACKED]
        in_spans = [u.numel for u in packed if not self.is_one_span(u)]
        self.unpacked = torch.empty(max(in_spans, default=0), device=model.device)
        self.trained_numel = sum(end - begin for spans in self.trained for begin, end, on in spans if on)
        if not self.trained_numel:
            raise UserError("every parameter is frozen: there is nothing to train")

    def defer(self, pending: Pending) -> Pending:
        """Another update, which no unit has had."""
        self.pending, self.visited = pending, set()
        return pending

    def begin(self) -> None:
        """A sweep begins. If the one before broke off, the units that it did not reach get their update first."""
        if self.visited:
            self.flush()
        self.visited = set()
        if self.pending is not None:  # otherwise flush has counted already
            self.changed.zero_()

    def is_due(self, unit: Unit) -> bool:
        return self.pending is not None and unit.index not in self.visited

    def is_one_span(self, unit: Unit) -> bool:
        """Whether all of a unit is trained, with no gaps in it."""
        return self.trained[unit.index] == [(0, unit.numel, True)]

    def fused(self) -> dict[str, Any]:
        """The update as arguments of an op that also perturbs."""
        return {"coef": self.pending.coef, "update_step": self.pending.step, **self.decay}

    def perturb(
        self, unit: Unit, w: torch.Tensor, plus: torch.Tensor, minus: torch.Tensor, perturbation: dict[str, Any]
    ) -> bool:
        """Writes both perturbed copies (perturbation: step, eps, direction); applies the update first if the unit has
        not had it. True if w changed. Of a packed unit, what was packed is what is perturbed."""
        update, spans = self.is_due(unit), self.trained[unit.index]
        fused = self.fused() | {"changed": self.changed} if update else {}
        if w.dtype == PACKED and self.is_one_span(unit):
            at = {"n": unit.numel, "offset": unit.start}
            ops.zo_packed_(w, plus, minus, **at, **self.noise, **perturbation, **fused)
            spans = []
        elif w.dtype == PACKED:
            if update:
                self.apply(unit, w)
                fused = {}
            ops.fp8_decode(w, self.unpacked[: unit.numel])
            w = self.unpacked[: unit.numel]
        for begin, end, trained in spans:
            w_, plus_, minus_ = w[begin:end], plus[begin:end], minus[begin:end]
            if not trained:
                plus_.copy_(w_)
                minus_.copy_(w_)
                continue
            how = {"offset": unit.start + begin, **self.noise, **perturbation}
            if fused:
                ops.zo_update_perturb_(w_, plus_, minus_, **how, **fused)
            else:
                ops.zo_perturb(w_, plus_, minus_, **how)
        self.visited.add(unit.index)
        return update

    def apply(self, unit: Unit, w: torch.Tensor) -> None:
        """The update alone, on a unit that is here, plain or packed."""
        if w.dtype != PACKED:
            self._apply_plain(unit, w)
        elif self.is_one_span(unit):
            at = {"n": unit.numel, "offset": unit.start, "changed": self.changed}
            ops.zo_packed_(w, **at, **self.noise, **self.fused())
        else:
            unpacked = self.unpacked[: unit.numel]
            ops.fp8_decode(w, unpacked)
            self._apply_plain(unit, unpacked)
            where = {"offset": unit.start, "seed": self.noise["seed"], "step": self.pending.step}
            ops.fp8_encode_(unpacked, w, **where, rounding=self.decay["rounding"])
        self.visited.add(unit.index)

    def _apply_plain(self, unit: Unit, w: torch.Tensor) -> None:
        for begin, end, trained in self.trained[unit.index]:
            if trained:
                at = {"offset": unit.start + begin, "coef": self.pending.coef, "step": self.pending.step}
                ops.zo_update_(w[begin:end], **at, **self.noise, **self.decay, changed=self.changed)

    def apply_to_rest(self) -> None:
        """Applies the update to every unit that has not had it in this sweep."""
        engine = self.model.engine
        for unit in self.model.layout.units:
            if self.is_due(unit):
                self.apply(unit, engine.acquire(unit.index))
                engine.commit(unit.index)
                engine.release(unit.index)

    @torch.no_grad()
    def flush(self) -> None:
        """Applies the update everywhere; there is none afterwards."""
        if self.pending is None:
            return
        if not self.visited:
            self.changed.zero_()
        with self.model.sweep("flush"):
            self.apply_to_rest()
        self.pending, self.visited = None, set()

    @torch.no_grad()
    def replay(self, updates: list[tuple[Pending, float]]) -> Iterator[Unit]:
        """Applies known updates, each with its weight decay, and yields every unit that has had them all. `changed`
        counts the last."""
        engine = self.model.engine
        decay, changed, uncounted = self.decay, self.changed.zero_(), torch.zeros_like(self.changed)
        try:
            with self.model.sweep("flush"):
                for unit in self.model.layout.units:
                    w = engine.acquire(unit.index)
                    for i, (self.pending, weight_decay) in enumerate(updates, start=1):
                        self.decay = decay | {"weight_decay": weight_decay}
                        self.changed = changed if i == len(updates) else uncounted
                        self.apply(unit, w)
                    engine.commit(unit.index)
                    engine.release(unit.index)
                    yield unit
        finally:
            self.decay, self.changed, self.pending = decay, changed, None


def trained_spans(unit: Unit) -> list[tuple[int, int, bool]]:
    """[begin, end) ranges of the unit with whether they are trained; one range when all its tensors agree. Gaps between
    aligned tensors are in none: they stay 0, as after loading, whatever a checkpoint does not hold."""
    spans: list[tuple[int, int, bool]] = []
    for tensor in unit.tensors:
        begin, end = max(0, tensor.start - unit.start), min(unit.numel, tensor.stop - unit.start)
        trained = tensor.param.requires_grad
        if spans and spans[-1][1:] == (begin, trained):
            spans[-1] = (spans[-1][0], end, trained)
        else:
            spans.append((begin, end, trained))
    return spans
