"""From gradients to moved weights: the sink of LSP's reverse sweep.

    linear, gradient      compressed gradients are added up in the unit's buffer (gather.py)
    finished              a unit's gradient is whole. Then, by where its moments are:

        device (device.py)   the weights move at once, while the unit is at hand
        host (host.py)       the gradient leaves, and the step comes back: a unit that lives on the device gets it
                                 as soon as it is there, at the latest when the next forward asks for it; a streamed
                                 one then

Each unit has its moments in one of the two places (methods/lsp/memory.py says which); nothing else about it differs, so a step
with some units here and some there is the same mathematics, and a state saved from one can be loaded into another.

Clipping needs the norm of all, which is known at the end of the reverse; every unit then moves when the next forward
asks for it. Nothing is stale either way.

A gradient that is not finite: its unit stays as it is (step.py: what becomes of the run); with clipping the norm of
all decides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from keyhole.methods.lsp.device import DeviceAdam
from keyhole.methods.lsp.gather import Gather, Pieces, place, seen
from keyhole.methods.lsp.host import HostAdam
from keyhole.methods.lsp.memory import group_of
from keyhole.methods.lsp.piece import Piece
from keyhole.methods.lsp.spans import Spans
from keyhole.methods.lsp.step import Outcomes, Step
from keyhole.methods.weight_decay import WeightDecay
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Unit
from keyhole.model.weights.homes import view


@dataclass
class Due:
    """A unit whose gradients have been given and whose weights have not moved yet."""

    given: list[Piece]
    step: Step


class Updates:
    """See the top of this file. on_device: units whose moments are there. how: rounding and seed of updates."""

    accumulates = True  # in S: every product of a linear layer is wanted (model/backward/reverse.py)

    def __init__(self, model: Model, units: Pieces, on_device: set[int], rule: dict[str, float], *,
                 max_grad_norm: float | None, weight_decay: WeightDecay, how: dict[str, Any],
                 threads: int | None) -> None:  # fmt: skip
        self.model, self.max_grad_norm, self.weight_decay, self.how = model, max_grad_norm, weight_decay, how
        self.pieces = {piece.tensor.start: piece for members in units.values() for piece in members}
        self.lengths, self.spans = place(units), Spans(model.device.type == "cuda")
        here = {unit: members for unit, members in units.items() if unit in on_device}
        away = {unit: members for unit, members in units.items() if unit not in on_device}
        self.device = DeviceAdam(here, self.lengths, model.device, rule, waits=max_grad_norm is not None)
        self.host = self._host(away, rule, threads) if away else None
        groups = {unit: group_of(model.layout.units[unit]) for unit in units}
        self.gather = Gather(self.lengths, groups, model.device, count=2 if away else 1)
        self.gather.waits = lambda: self.spans.of("exposed down")
        self.now, self.outcomes = Step(), Outcomes()
        self.due: dict[int, Due] = {}
        self.norm: torch.Tensor | None = None

    def _host(self, away: Pieces, rule: dict[str, float], threads: int | None) -> HostAdam:
        layout = self.model.layout
        front_or_back = {"spine": -1, "table": -1, "head": layout.block_count}
        layers = {u: front_or_back.get(layout.units[u].kind, layout.units[u].block) for u in away}
        return HostAdam(away, self.lengths, self.model.device, rule, layers, layout.block_count, self.spans, threads)

    def where(self, unit: int) -> DeviceAdam | HostAdam:
        """Who has the unit's moments."""
        return self.device if unit in self.device.lengths else self.host

    @property
    def waits(self) -> bool:
        """Whether units move when they are asked for."""
        return self.host is not None or self.max_grad_norm is not None

    # -- gradients come --------------------------------------------------------------------------------------------

    def begin(self, number: int, lr: float) -> None:
        """A reverse follows."""
        self.spans.turn()
        self.now = Step(number, lr)
        if self.host is not None:
            self.now.numbers = self.host.small(len(self.model.layout.units) + 1)

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """Adds the compressed product to S."""
        piece = self.pieces.get(tensor.start)
        if piece is not None:
            piece.add(*self._target(piece, w_OI), dy_MO, x_MI)
        return True

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Of what is no linear layer; or what was not offered."""
        piece = self.pieces.get(tensor.start)
        if piece is not None:
            piece.add_whole(*self._target(piece, w), grad)

    def buffer(self, unit: int) -> torch.Tensor:
        """Where the unit's gradient is gathered."""
        waiting = self.device.waiting.get(unit)
        return self.gather.of(unit) if waiting is None else waiting

    def _target(self, piece: Piece, w: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Where the piece's gradient is added up, and whether nothing is there yet."""
        given = self.now.given[piece.unit]
        first = piece.name not in given
        given[piece.name] = piece
        self.now.weights[piece.name] = w
        return seen(self.buffer(piece.unit), piece), first

    @torch.no_grad()
    def finished(self, unit: Unit) -> bool:
        """The unit's gradients are whole: its weights move now, or its update is due."""
        now, page = self.now, unit.index
        given = sorted(now.given.pop(page, {}).values(), key=lambda piece: piece.begin)
        if not given:
            return False
        weights, grad = [now.weights.pop(piece.name) for piece in given], self.buffer(page)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([seen(grad, piece) for piece in given])))
        now.norms.append(norm)
        due = Due(given, now)
        if self.where(page) is self.host:
            self._leave(page, due, grad, norm)
        elif self.max_grad_norm is not None:
            self.due[page] = due
        else:
            now.skips.append(skip := (~torch.isfinite(norm)).float())
            self.device.deltas_(page, given, grad, None, skip)
            self._apply(due, grad, weights)
            self.gather.done(page)
            return True
        return False

    def _leave(self, page: int, due: Due, grad: torch.Tensor, norm: torch.Tensor) -> None:
        """The gradient goes to the host; what has come back from there meanwhile is applied."""
        self.host.send(norm, due.step.numbers[page])
        self.host.leave(page, grad)
        self.gather.done(page, self.host.down)
        self.model.engine.bytes_down += 4 * self.lengths[page]
        self.due[page] = due
        if self.max_grad_norm is None:
            self._submit(page, due, due.step.numbers[page])
            self._apply_what_is_back()
            for other in [p for p in self.due if p not in self.model.engine.streamed and self.host.idle]:
                self.host.fetch(other)

    def _submit(self, page: int, due: Due, number: torch.Tensor) -> None:
        due.step.sent += 1
        self.host.submit(page, due.given, number, self.max_grad_norm, due.step.told)

    @torch.no_grad()
    def end(self) -> None:
        """The reverse is over: the norm of all that the optimizer sees is known."""
        now = self.now
        self.norm = torch.linalg.vector_norm(torch.stack(now.norms)) if now.norms else None
        if self.max_grad_norm is None:
            self.outcomes.expect(now)
            self._bring_what_is_next()
            return
        if self.norm is None:
            return
        now.clip = (self.max_grad_norm / (self.norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0)
        now.skip = (~torch.isfinite(self.norm)).float()
        if self.host is not None:
            self.host.send(self.norm, now.numbers[-1])
            for page, due in self.due.items():
                if self.where(page) is self.host:
                    self._submit(page, due, now.numbers[-1])

    # -- weights move ----------------------------------------------------------------------------------------------

    def _apply_what_is_back(self) -> None:
        """To units that live on the device, in the middle of a reverse."""
        engine = self.model.engine
        for page in [p for p in self.host.coming if p in self.due and p not in engine.streamed]:
            engine.acquire(page)

    def _bring_what_is_next(self) -> None:
        """At the end of a reverse, slots are for what the forward needs first."""
        if self.host is not None:
            self._apply_what_is_back()
            self._fetch_next()

    def arrived(self, page: int, w: torch.Tensor) -> bool:
        """Called by the engine with a page that is about to be used: what is due is applied."""
        due = self.due.pop(page, None)
        if due is None:
            return False
        unit, at_home = self.model.layout.units[page], self.where(page) is self.device
        with torch.no_grad():
            if at_home:
                delta = self.device.waiting[page]
                self.device.deltas_(page, due.given, delta, due.step.clip, due.step.skip)
            else:
                delta = self.host.deltas(page)
            self._apply(due, delta, [view(w, piece.tensor, unit.start) for piece in due.given])
        if not at_home:
            self.host.used(page)
            self.model.engine.bytes_up += 4 * self.lengths[page]
            self._fetch_next()
        return True

    def _fetch_next(self) -> None:
        """What the forward needs next is brought up, if it is there: the reverse gave it last."""
        for page in reversed(self.due):
            if self.where(page) is self.host and not self.host.fetch(page):
                return

    def _apply(self, due: Due, deltas: torch.Tensor, weights: list[torch.Tensor]) -> None:
        for piece, w in zip(due.given, weights, strict=True):
            keep = 1.0 - due.step.lr * self.weight_decay.of(piece.tensor.param)
            piece.apply(w, seen(deltas, piece), due.step.lr, keep, self.how | {"step": due.step.number})

    def move(self, wanted: Callable[[Unit], bool]) -> None:
        """Applies what is due to units that are `wanted`."""
        units, engine = self.model.layout.units, self.model.engine
        pages = [page for page in sorted(self.due) if wanted(units[page])]
        if pages:
            with engine.sweep("due", pages, learn=False):
                for page in pages:
                    engine.acquire(page)
                    engine.release(page)

    # -- between steps ---------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Waits for the host."""
        if self.host is not None:
            self.host.drain()
