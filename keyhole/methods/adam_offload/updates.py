"""Master weights and Adam's moments of the whole model in host memory, and their updates as jobs: for the CPU or for
the GPU, whichever is free.

Three flat fp32 arrays (methods/states.py), in the order of the layout without frozen units: 12 bytes per parameter,
however the model is cut into units and wherever the weights live. A tensor's state is a view of the arrays, so saving
copies nothing, and the state of a resident run can be resumed in a streamed one. On several ranks the arrays hold this
rank's part of each sharded unit, and ranges are relative to the beginning of that part.

As in torch, a tensor without a gradient in a step stays unchanged: no update, no decay, and its own count of updates
(for the bias correction) does not change. Adjacent tensors with equal counts and equal weight decay are updated
together, padding included, in parts that are a job each.

The CPU updates some 3 G parameters per second where the state is, and the link is idle meanwhile; so the GPU updates
some parts too, in a lane (exchange.py). Bytes per parameter, in 16 bit:

    by the CPU    host memory 26 (state and gradient), link 4 up (the new master)
    by the GPU    host memory and link 14 up (state and gradient), 12 down (state), 14 if weights are streamed

Which of the two updates a part depends on the pace (offload/workers.py), so the bits must not: ops/adam.py rounds alike
on both, and is compared at the start. If the bits differ, or memory cannot be page-locked, the CPU updates everything.

Every job first checks that the update may be applied: if a norm is not finite, weights stay unchanged (method.py says
which norm).
"""

import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.machine.gpu import accelerator
from keyhole.methods.adam_offload.exchange import Exchange, Lane, chunk_of
from keyhole.methods.adam_offload.memory import host_state, waiting_bytes
from keyhole.methods.adam_offload.traits import AdamOffloadConfig
from keyhole.methods.base import Saved, State
from keyhole.methods.states import Piece, States
from keyhole.methods.weight_decay import weight_decay_of
from keyhole.methods.work import check_host_memory
from keyhole.model.backward.sink import tensors_of
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Unit
from keyhole.offload import arena
from keyhole.offload.workers import Job, Workers
from keyhole.ops.adam import CHUNK_PER_THREAD, adamw_, host_adamw_, squares_of_host
from keyhole.ops.backend import use_kernel

NAMES = ("master", "exp_avg", "exp_avg_sq")
PART = 32 * 2**20  # elements per update job: some 10 ms


@dataclass(frozen=True)
class Trained:
    """A trained tensor, or a chunk of a table: its unit, its first element, and that of the next one."""

    unit: Unit
    start: int
    stop: int
    weight_decay: float


@dataclass(frozen=True)
class Part:
    """[begin, end) of this rank's part of a unit: adjacent tensors with equal update counts and weight decay. `step`:
    the number of the next update; `starts`: the trained tensors that are counted with it."""

    begin: int
    end: int
    step: int
    weight_decay: float
    starts: tuple[int, ...]


@dataclass
class AdamStep:
    """Data shared by the updates of one step. `numbers` on the host: norms of all tensors (`slots`: the index of each),
    then clip factor and norm of the whole gradient. waits_for_norm: these two are known before the first update."""

    lr: float
    norms_K: torch.Tensor
    numbers: torch.Tensor
    slots: dict[int, int]
    waits_for_norm: bool
    starts: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # unit -> tensors with a gradient
    waiting: list[tuple[Unit, list[int]]] = field(default_factory=list)  # units whose update must wait for the end
    submitted: bool = False
    applied: bool = False
    bad: bool = False

    def norms(self, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The norms of adjacent tensors: on the device, and their place on the host."""
        at = slice(self.slots[starts[0]], self.slots[starts[-1]] + 1)
        return self.norms_K[at], self.numbers[at]

    def is_bad(self, starts: list[int]) -> bool:
        """Whether these tensors must not be updated: a gradient is not finite."""
        if self.waits_for_norm:
            return not torch.isfinite(self.numbers[-1])
        return self.bad or not torch.isfinite(self.norms(starts)[1]).all()

    @property
    def clip(self) -> float:
        return float(self.numbers[-2]) if self.waits_for_norm else 1.0


def help_of_gpu(states: States, rule: dict[str, float], device: torch.device) -> tuple[str, str]:
    """How squares are summed if the GPU may update these states (ops/adam.py), which are page-locked then; else why it
    may not."""
    if not use_kernel(device):
        return "", "Triton is missing"
    if (squares := squares_of_host(device, rule)) is None:
        return "", "this build of torch rounds AdamW in a way that is not known here"
    return (squares, "") if states.pin(device) else ("", "the state in host memory could not be page-locked")


class Updates:
    """The three arrays, and the jobs that update them. trained: by the index of the first element; kept: by unit, the
    first element and the number of elements that this rank keeps. `who` says whether the device updates a part of them
    (on a CPU device, by the same kernel as the worker)."""

    def __init__(self, model: Model, own: AdamOffloadConfig) -> None:
        self.layout, self.engine = model.layout, model.engine
        self.cut = {page: (begin, part.numel()) for page, (begin, part) in self.engine.parts().items()}
        check_host_memory(*host_state(model.layout, self.engine.on_host, model.dtype.itemsize, own, self.cut))
        decay = weight_decay_of(model.module, own)
        self.trained: dict[int, Trained] = {}
        for unit in model.layout.units:
            tensors = tensors_of(unit)
            for tensor, stop in zip(tensors, [*(t.start for t in tensors[1:]), unit.stop], strict=False):
                if tensor.param.requires_grad:
                    self.trained[tensor.start] = Trained(unit, tensor.start, stop, decay.of(tensor.param))
        self.units = list({t.unit.index: t.unit for t in self.trained.values()}.values())
        self.counts = dict.fromkeys(self.trained, 0)
        self.kept = {unit.index: self.cut.get(unit.index, (0, unit.numel)) for unit in self.units}
        self.states = States({unit: numel for unit, (_, numel) in self.kept.items()}, NAMES)
        self.rule = {"beta1": own.beta1, "beta2": own.beta2, "eps": own.eps}

        helped = self.engine.cuda if own.gpu_updates is None else own.gpu_updates
        self.pool = Workers(own.threads, helper=helped)
        masters = {u.index: self.of(u)[0] for u in self.units if u.index not in self.engine.on_host}
        most = waiting_bytes(model.layout, model.dtype.itemsize)
        self.exchange = Exchange(self.engine, [u.index for u in self.units], self.pool, masters, most)
        for unit in self.units:
            master, *moments = self.of(unit)
            master.copy_(self.weights(unit))
            for moment in moments:  # written, so that a lack of memory fails here
                moment.zero_()
        self.squares, self.helps, self.who = "", helped, "; the device updates a part of them" if helped else ""
        self.lane: Lane | None = None
        if helped and self.engine.cuda:
            self.squares, why = help_of_gpu(self.states, self.rule, self.engine.device)
            self.helps, self.who = bool(self.squares), f"; the GPU cannot help: {why}"
            if self.helps:
                self.who = "; the GPU updates what it can meanwhile, in the same bits"
                chunk = chunk_of(min(PART, max(unit.numel for unit in self.units)))
                self.lane = Lane([torch.float32] * 3 + [model.dtype], self.engine.device, chunk)
        if self.engine.cuda and masters and not self.helps:
            arena.pin(arena.storage_of(self.states.arrays["master"]), self.engine.device)
        self.scratch = torch.empty(CHUNK_PER_THREAD * self.pool.threads)
        self.host_s = 0.0  # CPU time of updates, since the caller set it to 0
        self.share = 0.0  # share of all trained parameters that the GPU updated in the last step
        self._numel = self._up = self._down = 0  # parameters updated there and bytes moved since the last `settle`

    def of(self, unit: Unit, begin: int = 0, end: int | None = None) -> list[torch.Tensor]:
        """[master, exp_avg, exp_avg_sq] of a range of this rank's part of a unit."""
        return self.states.of(unit.index, begin, end)

    def ours(self, unit: Unit, start: int, stop: int) -> tuple[int, int]:
        """[begin, end) of the elements from start to stop in this rank's part of a unit; may be empty."""
        first, numel = self.kept[unit.index]
        begin, end = (min(max(at - unit.start - first, 0), numel) for at in (start, stop))
        return begin, end

    def weights(self, unit: Unit) -> torch.Tensor:
        """This rank's part of a unit's weights as they are at home, in host memory."""
        return self.exchange.staging[unit.index].copy_(self.engine.kept(unit.index))

    def follow(self) -> None:
        """Sets the masters to the weights where they do not round to them, because another method or the caller has
        changed these. Elsewhere they keep their precision."""
        for unit in self.units:
            for master, now in zip(self.of(unit)[0].split(PART), self.weights(unit).split(PART), strict=True):
                if not torch.equal(master.to(now.dtype), now):
                    master.copy_(torch.where(master.to(now.dtype) == now, master, now.float()))

    def write(self, unit: Unit, begin: int = 0, end: int | None = None) -> None:
        """Overwrites gradients that are not used with the current weights."""
        if unit.index in self.engine.on_host:
            self.exchange.staging[unit.index][begin:end].copy_(self.of(unit, begin, end)[0])

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, step: AdamStep, unit: Unit, starts: list[int], after: accelerator.Event | None) -> None:
        """Queues a unit's update after the event `after`. starts: first elements of its tensors with a gradient."""
        step.submitted = True
        for part in self.parts(starts):
            job = partial(self.by_cpu, step, unit, starts, part)
            on_device = partial(self.by_gpu, step, unit, starts, part) if self.helps else None
            self.exchange.submit(unit.index, job, after, (part.begin, part.end), on_device)

    def parts(self, starts: list[int]) -> list[Part]:
        """The parts to update, for tensors with a gradient (by their first elements): adjacent tensors with equal
        update counts and weight decay together, in pieces of at most PART."""
        found: list[Part] = []
        elsewhere: tuple[int, ...] = ()  # on other ranks, but counted here too
        for at in starts:
            one = self.trained[at]
            begin, end = self.ours(one.unit, one.start, one.stop)
            how = self.counts[at] + 1, one.weight_decay
            last = found[-1] if found else Part(0, 0, 0, 0.0, ())
            if begin == end:
                elsewhere = (*elsewhere, at)
            elif (last.end, last.step, last.weight_decay) == (begin, *how):
                found[-1] = replace(last, end=end, starts=(*last.starts, at))
            else:
                found.append(Part(begin, end, *how, (at,)))
        pieces = [
            replace(part, begin=i, end=min(i + PART, part.end), starts=part.starts if i == part.begin else ())
            for part in found
            for i in range(part.begin, part.end, PART)
        ]
        return [*pieces, Part(0, 0, 0, 0.0, elsewhere)] if elsewhere else pieces

    def _may_apply(self, step: AdamStep, unit: Unit, starts: list[int], part: Part) -> bool:
        """Whether the update is applied, and then counts it; if not, weights replace the gradients."""
        if step.is_bad(starts):
            step.bad = True
            self.write(unit, part.begin, part.end)
            return False
        step.applied = True
        for at in part.starts:
            self.counts[at] += 1
        return True

    def by_cpu(self, step: AdamStep, unit: Unit, starts: list[int], part: Part) -> None:
        """In the worker: updates a part. Of a streamed unit the new weights overwrite the gradients."""
        if not self._may_apply(step, unit, starts, part) or part.begin == part.end:
            return
        begin_s, grad = time.perf_counter(), self.exchange.staging[unit.index][part.begin : part.end]
        weight = grad if unit.index in self.engine.on_host else None
        master, m, v = self.of(unit, part.begin, part.end)
        host_adamw_(master, m, v, grad, weight, scratch=self.scratch, **self._numbers(step, part))
        self.host_s += time.perf_counter() - begin_s

    def _numbers(self, step: AdamStep, part: Part) -> dict[str, Any]:
        numbers = {"step": part.step, "weight_decay": part.weight_decay, "lr": step.lr, "clip": step.clip}
        return numbers | self.rule

    def by_gpu(self, step: AdamStep, unit: Unit, starts: list[int], part: Part) -> Job:
        """In the helper: starts the update; returns a function that waits for its end. New weights go to the device's
        copy, or, if the unit is streamed, to the gradients' place."""
        if not self._may_apply(step, unit, starts, part) or part.begin == part.end:
            return lambda: None
        streamed, grad = unit.index in self.engine.on_host, self.exchange.staging[unit.index][part.begin : part.end]
        home = None if streamed else self.engine.kept(unit.index).data[part.begin : part.end]
        (master, m, v), numbers = self.of(unit, part.begin, part.end), self._numbers(step, part)
        numel, element = grad.numel(), grad.element_size()
        self._numel += numel
        self._up += numel * (12 + element - (0 if streamed else 4))  # the exchange has already counted a master
        self._down += numel * (12 + (element if streamed else 0))
        if self.lane is None:
            host_adamw_(master, m, v, grad, grad, **numbers)
            if home is not None:
                home.copy_(grad)
            return lambda: None

        def change(begin: int, chunks: list[torch.Tensor]) -> None:
            w, m, v, g = chunks
            weight = g if home is None else home[begin : begin + g.numel()]
            adamw_(w, m, v, g, weight, squares=self.squares, **numbers)

        return self.lane.run([master, m, v, grad], back=4 if streamed else 3, change=change)

    def settle(self) -> None:
        """Adds up the counts of a step, once. Called by the engine's thread while no update runs."""
        if not self._up:
            return
        self.engine.bytes_up += self._up
        self.engine.bytes_down += self._down
        ranges = [self.ours(one.unit, one.start, one.stop) for one in self.trained.values()]
        self.share = self._numel / max(1, sum(end - begin for begin, end in ranges))
        self._numel = self._up = self._down = 0

    # -- saved -------------------------------------------------------------------------------------------------------

    def pieces(self, tensor: FlatTensor) -> list[Piece]:
        """Where this rank's part of a tensor is; a table may span several units."""
        units = [u for u in self.units if u.start < tensor.stop and tensor.start < u.stop]
        found = [(u, *self.ours(u, tensor.start, tensor.stop)) for u in units]
        return [
            Piece(u.index, begin, end, u.start + self.kept[u.index][0] + begin - tensor.start)
            for u, begin, end in found
            if begin < end
        ]

    def state_dict(self) -> State:
        """State by tensor, as views; for sharded tensors, as ranges."""
        state: State = {}
        for tensor in (tensor for tensor in self.layout.tensors if tensor.start in self.trained):
            whole = self.trained[tensor.start].unit.index not in self.cut
            state |= self.states.saved(tensor.name, tensor.shape, self.pieces(tensor), whole)
            state[f"{tensor.name}/step"] = self.counts[tensor.start]
        return state

    def load_state_dict(self, state: Saved) -> None:
        """Loads one tensor at a time, and sends its weights back."""
        for tensor in (tensor for tensor in self.layout.tensors if tensor.start in self.trained):
            if f"{tensor.name}/master" not in state:
                raise UserError(f"the optimizer state has no {tensor.name}, which this model trains")
            self.states.load(tensor.name, self.pieces(tensor), state)
            count = int(state[f"{tensor.name}/step"])
            self.counts |= {at: count for at in self.counts if tensor.start <= at < tensor.stop}
        for unit in self.units:
            self.write(unit)
            self.exchange.send_back(unit.index, 0, self.kept[unit.index][1])
