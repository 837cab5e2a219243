"""LSP-Offload: Adam in a learned sparse subspace of every matrix.

    S = P^T G Q     delta = Adam(S)     W <- W - lr (scale P delta Q^T + weight_decay W)

P [m, d] and Q [n, d] have r numbers a row (ops/projector.py). The gradient G = dY^T X never exists: the reverse sweep
(model/reverse.py) offers dY and X, both are compressed, and their product is S (lsp_piece.py). Micro-batches add up in
S. All that is no matrix of a block (`others`) is trained by plain Adam or stays as it is, by a setting.

Where Adam's moments are (`optimizer_on`), and when the weights move:

    gpu    lsp_device.py. At once, while the unit is still at hand in the reverse. 8 d^2 bytes a matrix.
    cpu    lsp_host.py. Gradients leave unit by unit, deltas come back; a unit on the device gets its delta as soon as
           it is there, at the latest when the next forward asks for it; a streamed unit then.
    auto   gpu if it fits the memory that is left, else cpu

max_grad_norm clips the norm of what the optimizer sees: S of all matrices, and the gradients of the others (the norm of
the whole gradient is not known, that being the point). It is known at the end of the reverse; all units then move when
the next forward asks for them. Nothing is stale either way.

A streamed unit goes home with its update, once a step. (To leave the host's weights as they are and add up all deltas
since the last change of projectors would save that way down, but the other way is the busy one, and each use of the
unit would need the sum of the deltas up as well; and weights that move by in-place rounding could not follow its bits.)

Projectors are learned on the gradients of the first batch, one matrix at a time, in a reverse of its own; every
check_freq steps a sample of the matrices is looked at again (lsp_learn.py).
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods import lsp_learn
from keyhole.methods.lsp_device import DeviceAdam, seen
from keyhole.methods.lsp_host import HostAdam
from keyhole.methods.lsp_piece import Piece
from keyhole.methods.lsp_setup import check_settings, choose_place, find_pieces, say_pieces
from keyhole.methods.settings import settings
from keyhole.model.batch import Batch, as_list, to_device
from keyhole.model.homes import view
from keyhole.model.layout import FlatTensor, Unit
from keyhole.model.model import Model
from keyhole.model.reverse import Reverse
from keyhole.weak import weakly


@dataclass
class _Due:
    """A unit whose gradients have been given and whose weights have not moved yet."""

    given: list[Piece]
    lr: float
    step: int
    share: "_Step"


@dataclass
class _Step:
    """What the units of one step share. numbers: on the host, norms by unit and that of the whole (cpu)."""

    given: dict[int, dict[str, Piece]] = field(default_factory=lambda: defaultdict(dict))
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: list[torch.Tensor] = field(default_factory=list)
    skips: list[torch.Tensor] = field(default_factory=list)
    clip: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    numbers: torch.Tensor | None = None


class LSP:
    """See the top of this file. `lr` may be changed between steps."""

    name = "lsp"
    accumulates = True  # in S: every product of a linear layer is wanted (model/reverse.py)

    def __init__(
        self,
        model: Model,
        lr: float = 1e-4,
        *,
        d: int = 1024,
        r: int = 4,
        kind: str = "blocks",
        alpha: float = 0.5,
        check_freq: int = 1000,
        check_share: float = 0.25,
        fit_steps: int = 50,
        learn: bool = True,
        others: str = "adam",
        optimizer_on: str = "auto",
        threads: int | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        rounding: str = "stochastic",
        activations: str = "block",
        compile: bool | str = False,
        seed: int = 0,
    ) -> None:
        check_settings(model, d, r, kind, others, optimizer_on, rounding, activations)
        self.model, self.lr, self.weight_decay, self.seed = model, lr, weight_decay, seed
        self.d, self.r, self.kind, self.rounding, self.others = d, r, kind, rounding, others
        self.alpha, self.check_freq, self.check_share = alpha, check_freq, check_share
        self.fit_steps, self.learn, self.max_grad_norm = fit_steps, learn, max_grad_norm
        self.units = find_pieces(model, d, r, kind, others, seed)
        self.pieces = {piece.tensor.start: piece for members in self.units.values() for piece in members}
        self.reverse = Reverse(model, keep=activations, compiled=compile)
        rule = {"beta1": beta1, "beta2": beta2, "eps": eps}
        if choose_place(model, self.units, optimizer_on, max_grad_norm is not None) == "gpu":
            self.optimizer: Any = DeviceAdam(self.units, model.device, rule, waits=max_grad_norm is not None)
        else:
            layers = {u: -1 if (b := model.layout.units[u].block) is None else b for u in self.units}
            self.optimizer = HostAdam(self.units, model.device, rule, layers, threads)
        self.on_host = self.optimizer.on == "host"
        self.step_count, self.biases = 0, {}  # biases: of the matrices that this step looked at
        self.now = _Step()
        self.due: dict[int, _Due] = {}
        self.norm: torch.Tensor | None = None
        self.reports: list[tuple[Any, torch.Tensor, int]] = []  # how many units skipped a step, on their way here
        if self.on_host or max_grad_norm is not None:
            model.engine.arrival = weakly(self._arrived)
        self._end = weakref.finalize(self, _end, self.optimizer, model.engine, model.engine.arrival)

    @classmethod
    def from_config(cls, model: Model, config: Any) -> "LSP":
        return cls(model, config.learning_rate, **settings(config, cls.name))

    # -- one step --------------------------------------------------------------------------------------------------

    def step(self, batch: Batch | list[Batch]) -> torch.Tensor:
        """One update from one batch or the micro-batches of one step. Returns the loss, unread."""
        batches = [to_device(b, self.model.device) for b in as_list(batch)]
        looks = self.learn and self.step_count % self.check_freq == 0
        self.biases = {}
        if looks:
            self.flush()
        self._move_due(lambda unit: unit.kind != "block")  # read without being asked for
        with self.reverse.sweep(2 if looks else 1):
            loss = self.reverse.forward(batches)
            self._raise_if_broken()
            if looks:
                self.reverse.reverse(lsp_learn.Learner(self), last=False)
            self.now = _Step()
            self.step_count += 1
            if self.on_host:
                self._begin_on_host()
            self.reverse.reverse(self)
            self._end_reverse(self.now)
        return loss

    def _begin_on_host(self) -> None:
        self.optimizer.learn_times()
        self.optimizer.skipped = self.optimizer.applied = 0
        self.optimizer.wait_s = 0.0
        self.now.numbers = self.optimizer.small(len(self.model.layout.units) + 1)

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

    def _target(self, piece: Piece, w: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Where the piece's gradient is added up, and whether nothing is there yet."""
        given = self.now.given[piece.unit]
        first = piece.name not in given
        given[piece.name] = piece
        self.now.weights[piece.name] = w
        return seen(self.optimizer.buffer(piece.unit), piece), first

    @torch.no_grad()
    def finished(self, unit: Unit) -> bool:
        """The unit's gradients are whole: its weights move now, or its update is due."""
        given = sorted(self.now.given.pop(unit.index, {}).values(), key=lambda piece: piece.begin)
        if not given:
            return False
        buffer, now = self.optimizer.buffer(unit.index), self.now
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([seen(buffer, piece) for piece in given])))
        now.norms.append(norm)
        due = _Due(given, self.lr, self.step_count, now)
        if self.on_host:
            self._leave(unit.index, due, norm)
        elif self.max_grad_norm is not None:
            self.due[unit.index] = due
        else:
            now.skips.append(skip := (~torch.isfinite(norm)).float())
            deltas = self.optimizer.deltas(unit.index, given, None, skip)
            self._apply(due, deltas, [now.weights.pop(piece.name) for piece in given])
            return True
        for piece in given:
            now.weights.pop(piece.name)
        return False

    def _leave(self, unit: int, due: _Due, norm: torch.Tensor) -> None:
        """The gradient goes to the host; what has come back from there meanwhile is applied."""
        self.optimizer.send(norm, due.share.numbers[unit])
        self.optimizer.leave(unit)
        self.model.engine.bytes_down += 4 * self.optimizer.lengths[unit]
        if self.max_grad_norm is None:
            self.optimizer.submit(unit, due.given, due.share.numbers[unit], None)
        for page in [p for p in self.due if p in self.optimizer.coming and p not in self.model.engine.streamed]:
            self._arrived(page, self.model.engine.homes[page])
        self.due[unit] = due
        for page in self.due if self.max_grad_norm is None else ():
            if page not in self.model.engine.streamed and not self.optimizer.fetch(page):
                break

    @torch.no_grad()
    def _end_reverse(self, now: _Step) -> None:
        """The norm of all that the optimizer sees is known."""
        self.norm = torch.linalg.vector_norm(torch.stack(now.norms)) if now.norms else None
        if self.on_host and self.max_grad_norm is not None:
            self.optimizer.send(self.norm, now.numbers[-1])
            for unit, due in self.due.items():
                self.optimizer.submit(unit, due.given, now.numbers[-1], self.max_grad_norm)
        elif self.max_grad_norm is not None and self.norm is not None:
            now.clip = (self.max_grad_norm / (self.norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0)
            now.skip = (~torch.isfinite(self.norm)).float()
        elif now.skips:
            self._report(torch.stack(now.skips).sum(), len(now.skips))

    # -- the weights move ------------------------------------------------------------------------------------------

    def _arrived(self, page: int, w: torch.Tensor) -> bool:
        """Called by the engine with a page that is about to be used: what is due is applied."""
        due = self.due.pop(page, None)
        if due is None:
            return False
        unit, opt = self.model.layout.units[page], self.optimizer
        with torch.no_grad():
            deltas = opt.deltas(page) if self.on_host else opt.deltas(page, due.given, due.share.clip, due.share.skip)
            self._apply(due, deltas, [view(w, piece.tensor, unit.start) for piece in due.given])
            if self.on_host:
                opt.used(page)
                self.model.engine.bytes_up += 4 * opt.lengths[page]
                for following in list(self.due)[::-1][:1]:  # the reverse gave them last to first
                    opt.fetch(following)
        return True

    def _apply(self, due: _Due, deltas: torch.Tensor, weights: list[torch.Tensor]) -> None:
        how = {"rounding": self.rounding, "seed": self.seed, "step": due.step}
        keep = 1.0 - due.lr * self.weight_decay
        for piece, w in zip(due.given, weights, strict=True):
            piece.apply(w, seen(deltas, piece), due.lr, keep, how)

    def _move_due(self, wanted: Callable[[Unit], bool]) -> None:
        """Applies what is due to units that are `wanted`."""
        units, engine = self.model.layout.units, self.model.engine
        pages = [page for page in sorted(self.due) if wanted(units[page])]
        if pages:
            with engine.sweep("due", pages, learn=False):
                for page in pages:
                    engine.acquire(page)
                    engine.release(page)

    # -- between steps ---------------------------------------------------------------------------------------------

    def _report(self, skipped: torch.Tensor, units: int) -> None:
        """How many units skipped the step is read when it is there, not waited for."""
        event, here = None, skipped
        if skipped.is_cuda:
            here = torch.empty((), pin_memory=True).copy_(skipped, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.reports.append((event, here, units))

    def _raise_if_broken(self, wait: bool = False) -> None:
        broken = self.on_host and self.optimizer.skipped and self.optimizer.applied and self.max_grad_norm is None
        while self.reports and (wait or self.reports[0][0] is None or self.reports[0][0].query()):
            event, here, units = self.reports.pop(0)
            if event is not None:
                event.synchronize()
            broken = broken or 0 < float(here) < units
        if broken:
            raise UserError(
                "lsp: a gradient was not finite in part of the last step, and the rest had been applied: the weights "
                "in memory are not usable. Go on from the last checkpoint; max_grad_norm makes it skip such a step"
            )

    def flush(self) -> None:
        """Applies everything that is due: the weights at home are those after the last step."""
        self._move_due(lambda unit: True)
        if self.on_host:
            self.optimizer.drain()
        self._raise_if_broken(wait=True)

    def metrics(self) -> dict[str, Any]:
        """Of the last step. grad_norm: of what the optimizer sees, unclipped; bias: mean of the matrices looked at."""
        found: dict[str, Any] = {} if self.norm is None else {"grad_norm": self.norm}
        found |= {"bias": sum(self.biases.values()) / len(self.biases)} if self.biases else {}
        return found | ({"host_wait_s": self.optimizer.wait_s} if self.on_host else {})

    def describe(self) -> list[str]:
        """For the start block."""
        return say_pieces(self)

    def state_dict(self) -> dict[str, Any]:
        """Flush first. Projectors are their numbers; where these stand is drawn again from the seed."""
        self.flush()
        state: dict[str, Any] = {"step_count": self.step_count, "seed": self.seed}
        for piece in self.pieces.values():
            m, v = self.optimizer.moments(piece)
            state |= {f"{piece.name}/exp_avg": m, f"{piece.name}/exp_avg_sq": v}
            state[f"{piece.name}/step"] = self.optimizer.count(piece)
            if piece.p is not None:
                state |= {f"{piece.name}/p": piece.p.values_Rr, f"{piece.name}/q": piece.q.values_Rr}
                state[f"{piece.name}/generation"] = piece.generation
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed:
            raise UserError(f"seed: the checkpoint was made with {state['seed']}, this run has {self.seed}")
        self.flush()
        self.step_count = int(state["step_count"])
        for piece in self.pieces.values():
            if f"{piece.name}/exp_avg" not in state:
                raise UserError(f"the optimizer state has no {piece.name}, which this run trains")
            if piece.p is not None:
                lsp_learn.restore(self, piece, state)
            for moment, key in zip(self.optimizer.moments(piece), ("exp_avg", "exp_avg_sq"), strict=True):
                moment.copy_(state[f"{piece.name}/{key}"])
            self.optimizer.set_count(piece, int(state[f"{piece.name}/step"]))

    def close(self) -> None:
        """Ends the worker. Flush first."""
        self._end()


def _end(optimizer: Any, engine: Any, arrival: Any) -> None:
    optimizer.close()
    if engine.arrival is arrival:  # and not that of a method that came later
        engine.arrival = None
