"""AdamW whose master weights and moments live in host memory, updated there while the GPU works.

The rule is torch's AdamW, exactly, on fp32 masters (ops/host_adam.py). Bytes a parameter:

    host     12 (master, two moments) + 2 (16-bit weight, or the gradient on its way: offload/exchange.py) = 14
    device   2 where the model is resident; two blocks or so where it is streamed. Gradients: one block's, in passing.
    link     2 down (gradient), 2 up (weight) a step; streamed 4 up (forward and reverse)

One step, layer by layer (schedule: layerwise):

    reverse     the sweep (model/reverse.py) gives the gradient of each tensor, whole, summed over all micro-batches; it
                leaves for the host on its own stream while the blocks below are differentiated
    update      a worker updates a unit as soon as its gradients have arrived, always the one that the next forward
                needs first
    return      a resident unit's weights are sent back by the worker; a streamed one's are at home already
    forward     the next one waits at each unit for its weights, and for nothing else

max_grad_norm needs the norm of the whole gradient, which is known at the end of the reverse: norms of tensors are taken
on the GPU as they leave, and the updates run under the next forward. Nothing is stale and nothing approximate; both
orders, and schedule: monolithic (all gradients out, then all updates, then all weights back: ZeRO-Offload's order, to
compare with) give the same bits.

A gradient that is not finite: with max_grad_norm (or monolithic) the step changes nothing. Without, units above may
have been updated before it was met; if any was, the run stops at once, since the weights are then of two steps. (A loss
that is not finite makes every gradient so, and then nothing has changed.)
"""

import time
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.model.batch import Batch, as_list, to_device
from keyhole.model.homes import view
from keyhole.model.layout import FlatTensor, Unit
from keyhole.model.model import Model
from keyhole.model.reverse import Reverse
from keyhole.offload import arena
from keyhole.offload.exchange import Exchange, Span
from keyhole.offload.workers import Workers
from keyhole.ops.host_adam import CHUNK_PER_THREAD, host_adamw_
from keyhole.plan.states import check_host_state

SCHEDULES = ("layerwise", "monolithic")
STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass
class _Step:
    """What the updates of one step share. `numbers` on the host: norms of all tensors, then clip factor and norm."""

    lr: float
    norms_K: torch.Tensor
    numbers: torch.Tensor
    given: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # unit -> starts of its gradients
    waiting: list[tuple[Unit, list[int]]] = field(default_factory=list)  # units whose update must wait for the end
    applied: bool = False
    bad: bool = False


class AdamOffload:
    """See the top of this file. `lr` may be changed between steps."""

    name = "adam-offload"

    def __init__(
        self,
        model: Model,
        lr: float = 2e-5,
        *,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        schedule: str = "layerwise",
        threads: int | None = None,
        activations: str = "block",
        compile: bool | str = False,
        seed: int = 0,
    ) -> None:
        if schedule not in SCHEDULES:
            raise UserError(f"adam_offload.schedule: {schedule!r} is not one of {', '.join(SCHEDULES)}")
        if any(home.dtype != model.dtype for home in model.engine.homes):
            raise UserError("wire: adam-offload keeps its own fp32 weights; set wire=null and choose dtype")
        self.model, self.lr, self.max_grad_norm, self.schedule = model, lr, max_grad_norm, schedule
        self.rule = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        self.units = [u for u in model.layout.units if any(t.param.requires_grad for t in u.tensors)]
        if not self.units:
            raise UserError("every parameter is frozen: there is nothing to train")
        check_host_state(model.layout, model.engine.streamed, model.dtype.itemsize, loaded=True)
        self.reverse = Reverse(model, keep=activations, compiled=compile)
        self.pool = Workers(threads)
        self.exchange = Exchange(model.engine, [u.index for u in self.units], self.pool)
        self._end = weakref.finalize(self, _end, self.pool, model.engine)
        self.scratch = torch.empty(CHUNK_PER_THREAD * self.pool.threads)
        self.tensors = {s.start: s for unit in self.units for s in _spans(unit)}
        self.slots = {start: k for k, start in enumerate(self.tensors)}  # of norms; those of a unit side by side
        self.steps = dict.fromkeys(self.tensors, 0)  # updates so far, by tensor: one without a gradient has none
        self._reserve()
        self.now: _Step | None = None
        self.host_s = 0.0

    @classmethod
    def from_config(cls, model: Model, config: Any) -> "AdamOffload":
        return cls(
            model,
            config.learning_rate,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            **vars(config.adam_offload),
        )

    def _reserve(self) -> None:
        """Flat fp32 arrays over the whole model; the master starts as the weights."""
        numel = self.model.layout.numel
        self.master, self.exp_avg, self.exp_avg_sq = (arena.host_memory(4 * numel).view(torch.float32) for _ in STATES)
        for unit in self.units:
            at, home = slice(unit.start, unit.stop), self.model.engine.homes[unit.index]
            self.master[at].copy_(self.exchange.staging[unit.index].copy_(home))
            self.exp_avg[at].zero_()  # touched now: what does not fit should fail here
            self.exp_avg_sq[at].zero_()

    # -- one step --------------------------------------------------------------------------------------------------

    def step(self, batch: Batch | list[Batch]) -> torch.Tensor:
        """One update from one batch or the micro-batches of one step. Returns the loss, unread."""
        batches = [to_device(b, self.model.device) for b in as_list(batch)]
        self.exchange.wait_s = self.host_s = 0.0
        with self.reverse.sweep():
            self.exchange.wait(self.model.layout.spine.index)
            loss = self.reverse.forward(batches)
            self._raise_if_broken()  # the forward has waited for every unit, so this is all of the last step
            norms_K = torch.zeros(len(self.slots), device=self.model.device)
            self.now = _Step(self.lr, norms_K, self.exchange.small(len(self.slots) + 2))
            self.reverse.reverse(self)
            self._end_reverse(self.now)
        return loss

    @property
    def _clips_at_end(self) -> bool:
        return self.max_grad_norm is not None or self.schedule == "monolithic"

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """The gradient is needed as a tensor: it has to travel."""
        return False

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Takes the norm and sends the gradient off."""
        torch.linalg.vector_norm(grad, dtype=torch.float32, out=self.now.norms_K[self.slots[tensor.start]])
        unit = self.tensors[tensor.start].unit
        self.exchange.put(unit.index, tensor.start - unit.start, grad)
        self.now.given[unit.index].append(tensor.start)

    def finished(self, unit: Unit) -> bool:
        """The unit's gradients are on their way; its update is submitted, now or at the end."""
        given = sorted(self.now.given[unit.index])
        if given and self._clips_at_end:
            self.now.waiting.append((unit, given))
        elif given:
            first, last = self.slots[given[0]], self.slots[given[-1]] + 1
            self.exchange.send(self.now.norms_K[first:last], self.now.numbers[first:last])
            self._submit(self.now, unit, given, self.exchange.sent())
        return False

    def _end_reverse(self, step: _Step) -> None:
        """The norm of the whole gradient is known: clip factor and norm leave, and the updates that waited for them."""
        self.norm = torch.linalg.vector_norm(step.norms_K)
        if not self._clips_at_end:
            return
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        clip = (limit / (self.norm + 1e-6)).clamp(max=1.0)
        self.exchange.send(torch.stack([clip, self.norm]), step.numbers[-2:])
        after = self.exchange.sent()
        for unit, given in step.waiting:
            self._submit(step, unit, given, after)
        if self.schedule == "monolithic":
            self.pool.drain()
            for unit, given in step.waiting if not step.bad else ():
                self.exchange.send_back(unit.index, self._ranges(given))

    def _submit(self, step: _Step, unit: Unit, given: list[int], after: Any) -> None:
        job, layerwise = (lambda: self._update(step, unit, given)), self.schedule == "layerwise"
        self.exchange.submit(unit.index, job, after, self._ranges(given), at_once=layerwise)

    def _ranges(self, given: list[int]) -> list[Span]:
        """Places in their unit, padding included, of tensors side by side that have had equally many updates."""
        ranges: list[list[int]] = []
        for at in given:
            span = self.tensors[at]
            begin, end = span.start - span.unit.start, span.stop - span.unit.start
            if ranges and ranges[-1][1] == begin and ranges[-1][2] == self.steps[at]:
                ranges[-1][1] = end
            else:
                ranges.append([begin, end, self.steps[at]])
        return [(begin, end) for begin, end, _ in ranges]

    # -- in the worker ---------------------------------------------------------------------------------------------

    def _update(self, step: _Step, unit: Unit, given: list[int]) -> None:
        """One unit: the gradients in its staging buffer become its new weights."""
        begin_s, staging = time.perf_counter(), self.exchange.staging[unit.index]
        if self._is_bad(step, given):
            step.bad = True
            staging.copy_(self.master[unit.start : unit.stop])  # the weights as they were
            return
        step.applied = True
        clip = float(step.numbers[-2]) if self._clips_at_end else 1.0
        for begin, end in self._ranges(given):
            at, part = slice(unit.start + begin, unit.start + end), staging[begin:end]
            count = self.steps[unit.start + begin] + 1
            state = (self.master[at], self.exp_avg[at], self.exp_avg_sq[at])
            host_adamw_(*state, part, part, step=count, lr=step.lr, clip=clip, scratch=self.scratch, **self.rule)
        for at in given:
            self.steps[at] += 1
        self.host_s += time.perf_counter() - begin_s

    def _is_bad(self, step: _Step, given: list[int]) -> bool:
        if self._clips_at_end:
            return not torch.isfinite(step.numbers[-1])
        return step.bad or not torch.isfinite(step.numbers[self.slots[given[0]] : self.slots[given[-1]] + 1]).all()

    # -- between steps ---------------------------------------------------------------------------------------------

    def _raise_if_broken(self) -> None:
        if self.now is not None and self.now.bad and self.now.applied:
            raise UserError(
                "a gradient of the last step is not finite, and part of the step had been applied: the weights in "
                "memory are not usable. Go on from the last checkpoint; with max_grad_norm set, such a step is found "
                "and skipped before anything changes"
            )

    def flush(self) -> None:
        """Waits for all updates: the weights at home are those after the last step."""
        self.exchange.drain()
        self._raise_if_broken()

    def metrics(self) -> dict[str, Any]:
        """Of the last step. grad_norm: whole and unclipped, unread; host_wait_s: launches waited for host updates."""
        if self.now is None:
            return {}
        return {"grad_norm": self.norm, "host_wait_s": self.exchange.wait_s}

    def describe(self) -> list[str]:
        """For the start block."""
        gib = 12 * sum(u.numel for u in self.units) / 2**30
        when = "at the end of the reverse, under the next forward" if self._clips_at_end else "as gradients arrive"
        when = "between reverse and forward" if self.schedule == "monolithic" else when
        return [
            f"adam-offload: {gib:.2f} GiB of fp32 state in host memory, {self.pool.threads} threads; updates {when}"
        ]

    def state_dict(self) -> dict[str, Any]:
        """Views, not copies. Flush first."""
        self.flush()
        state: dict[str, Any] = {}
        for tensor in self.model.layout.tensors:
            if tensor.param.requires_grad:
                flats = (self.master, self.exp_avg, self.exp_avg_sq)
                state |= {
                    f"{tensor.name}/{key}": view(flat, tensor, 0) for key, flat in zip(STATES, flats, strict=True)
                }
                state[f"{tensor.name}/step"] = self.steps[tensor.start]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """One tensor at a time; the weights become the masters, rounded."""
        self.flush()
        for tensor in self.model.layout.tensors:
            if not tensor.param.requires_grad:
                continue
            if f"{tensor.name}/master" not in state:
                raise UserError(f"the optimizer state has no {tensor.name}, which this model trains")
            for key, flat in zip(STATES, (self.master, self.exp_avg, self.exp_avg_sq), strict=True):
                view(flat, tensor, 0).copy_(state[f"{tensor.name}/{key}"])
            for at, span in self.tensors.items():
                if tensor.start <= span.start < tensor.stop:
                    self.steps[at] = int(state[f"{tensor.name}/step"])
        for unit in self.units:
            self.exchange.staging[unit.index].copy_(self.master[unit.start : unit.stop])
            self.exchange.send_back(unit.index, [(0, unit.numel)])
        self.exchange.drain()
        self.model.engine.invalidate()

    def close(self) -> None:
        """Ends the worker. Flush first."""
        self._end()


@dataclass(frozen=True)
class _Span:
    """A trained tensor, or a chunk of a table: where it begins, where the next begins, and in which unit."""

    unit: Unit
    start: int
    stop: int


def _spans(unit: Unit) -> list[_Span]:
    if unit.rows is not None:
        return [_Span(unit, unit.start, unit.stop)]
    stops = [t.start for t in unit.tensors[1:]] + [unit.stop]
    pairs = zip(unit.tensors, stops, strict=True)
    return [_Span(unit, t.start, stop) for t, stop in pairs if t.param.requires_grad]


def _end(pool: Workers, engine: Any) -> None:
    pool.close()
    engine.gate = None
