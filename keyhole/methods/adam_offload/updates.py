"""From gradients in host memory to new weights: updates as jobs, for the CPU or for the GPU, whichever is free.

A unit whose gradients were sent is cut into parts (state.py), and each part is a job. The CPU updates some 3 G
parameters per second where the state is, and the link is idle meanwhile; so the GPU updates some parts too. Bytes per
parameter, in 16 bit:

    by the CPU    host memory 26 (state and gradient), link 4 up (the new master)
    by the GPU    host memory and link 14 up (state and gradient), 12 down (state), 14 if weights are streamed

The GPU's part of the work goes chunk by chunk through a ring of slots on the device, on three streams that events alone
order: one chunk is copied in while one is updated and one is copied back, and the next part begins while the last one
is still being copied back.

    up     waits for: the slot's last copy back;   then copies a chunk of every tensor in
    work   waits for: that;                        then updates the chunk
    down   waits for: that;                        then copies the chunk back

Which of the two updates a part depends on the pace (offload/workers.py), so the bits must not: ops/adam.py rounds alike
on both, and is compared at the start. If the bits differ, or memory cannot be page-locked, the CPU updates everything.

Every job first checks that the update may be applied: if a norm is not finite, weights stay unchanged (method.py says
which norm).
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from keyhole.methods.adam_offload.exchange import Exchange
from keyhole.methods.adam_offload.state import PART, AdamState, AdamStep, Part
from keyhole.model.structure.layout import Unit
from keyhole.offload.slots import lend
from keyhole.offload.workers import Job
from keyhole.ops.adam import CHUNK_PER_THREAD, adamw_, squares_of_host
from keyhole.ops.backend import use_kernel

SLOTS = 3
CHUNK = 4 * 2**20  # elements: 16 MiB of fp32, enough for a copy to run at the link's rate


def chunk_of(numel: int) -> int:
    """Elements per chunk for ranges of at most this many."""
    return min(CHUNK, numel)


class Lane:
    """A ring of slots on the device for host tensors of these dtypes. Only one thread may use it at a time."""

    def __init__(self, dtypes: list[torch.dtype], device: torch.device, chunk: int) -> None:
        self.chunk, self.turn = chunk, 0
        self.slots = [[torch.empty(chunk, dtype=dtype, device=device) for dtype in dtypes] for _ in range(SLOTS)]
        self.up, self.work, self.down = streams = [torch.cuda.Stream(device) for _ in range(3)]
        self.arrived, self.changed, self.left = ([torch.cuda.Event() for _ in range(SLOTS)] for _ in range(3))
        for buffer in (buffer for slot in self.slots for buffer in slot):
            lend(buffer, streams)

    def run(
        self, tensors: list[torch.Tensor], back: int, change: Callable[[int, list[torch.Tensor]], None]
    ) -> Callable[[], None]:
        """Sends flat host tensors through the device. change(begin, chunks) enqueues kernels on the chunks at `begin`;
        the first `back` tensors are copied back. Returns at once a function that blocks until all of it is done."""
        for begin in range(0, tensors[0].numel(), self.chunk):
            i, self.turn = self.turn % SLOTS, self.turn + 1
            homes = [flat[begin : begin + self.chunk] for flat in tensors]
            chunks = [buffer[: home.numel()] for buffer, home in zip(self.slots[i], homes, strict=True)]
            with torch.cuda.stream(self.up):
                self.up.wait_event(self.left[i])
                for home, there in zip(homes, chunks, strict=True):
                    there.copy_(home, non_blocking=True)
                self.arrived[i].record(self.up)
            with torch.cuda.stream(self.work):
                self.work.wait_event(self.arrived[i])
                change(begin, chunks)
                self.changed[i].record(self.work)
            with torch.cuda.stream(self.down):
                self.down.wait_event(self.changed[i])
                for home, there in zip(homes[:back], chunks, strict=False):
                    home.copy_(there, non_blocking=True)
                self.left[i].record(self.down)
        end = torch.cuda.Event(blocking=True)
        end.record(self.down)
        return end.synchronize


class Updates:
    """The jobs that update units. helped: the device updates a part of them, if it can; on a CPU device, by the same
    kernel as the worker. `who` says whether it does."""

    def __init__(self, state: AdamState, exchange: Exchange, dtype: torch.dtype, helped: bool) -> None:
        self.state, self.exchange, self.engine = state, exchange, exchange.engine
        self.scratch = torch.empty(CHUNK_PER_THREAD * exchange.pool.threads)
        self.host_s = 0.0  # CPU time of updates, since the caller set it to 0
        self.share = 0.0  # share of all trained parameters that the GPU updated in the last step
        self._numel = self._up = self._down = 0  # parameters updated there and bytes moved since the last `settle`
        self.squares: str | None = None
        self.lane: Lane | None = None
        self.helps, self.who = self._may_help() if helped else (False, "")
        if self.helps and self.engine.cuda:
            chunk = chunk_of(min(PART, max(unit.numel for unit in state.units)))
            self.lane = Lane([torch.float32] * 3 + [dtype], self.engine.device, chunk)

    def _may_help(self) -> tuple[bool, str]:
        device = self.engine.device
        if not self.engine.cuda:
            return True, "the device updates a part of them"
        if not use_kernel(device):
            return False, "the GPU cannot help: Triton is missing"
        self.squares = squares_of_host(device, self.state.rule)
        if self.squares is None:
            return False, "the GPU cannot help: this build of torch rounds AdamW in a way that is not known here"
        if not self.state.states.pin(device):
            return False, "the GPU cannot help: the state in host memory could not be page-locked"
        return True, "the GPU updates what it can meanwhile, in the same bits"

    def submit(self, step: AdamStep, unit: Unit, starts: list[int], after: Any) -> None:
        """Queues a unit's update after the event `after`. starts: first elements of its tensors with a gradient."""
        step.submitted = True
        for part in self.state.parts(starts):
            job = partial(self.by_cpu, step, unit, starts, part)
            on_device = partial(self.by_gpu, step, unit, starts, part) if self.helps else None
            self.exchange.submit(unit.index, job, after, [(part.begin, part.end)], on_device)

    def write(self, unit: Unit, begin: int = 0, end: int | None = None) -> None:
        """Overwrites a gradient that is not used with the current weights."""
        if unit.index in self.engine.on_host:
            self.state.write(unit, self.exchange.staging[unit.index], begin, end)

    def settle(self) -> None:
        """Adds up the counts of a step, once. Called by the engine's thread while no update runs."""
        if not self._up:
            return
        self.engine.bytes_up += self._up
        self.engine.bytes_down += self._down
        self.share = self._numel / max(1, self.state.trained_numel)
        self._numel = self._up = self._down = 0

    # -- in the worker, and in its helper --------------------------------------------------------------------------

    def _may_apply(self, step: AdamStep, unit: Unit, starts: list[int], part: Part) -> bool:
        """Whether the update is applied, and then counts it; if not, weights replace the gradients."""
        if step.is_bad(starts):
            step.bad = True
            self.write(unit, part.begin, part.end)
            return False
        step.applied = True
        return True

    def by_cpu(self, step: AdamStep, unit: Unit, starts: list[int], part: Part) -> None:
        """Overwrites the gradients in the staging buffer with new weights, or updates only the master."""
        if not self._may_apply(step, unit, starts, part):
            return
        begin_s, page = time.perf_counter(), self.exchange.staging[unit.index]
        if part.begin < part.end:
            streamed = unit.index in self.engine.on_host
            self.state.update(unit, part, page, step.lr, step.clip, in_place=streamed, scratch=self.scratch)
            self.host_s += time.perf_counter() - begin_s
        self.state.count(part)

    def by_gpu(self, step: AdamStep, unit: Unit, starts: list[int], part: Part) -> Job:
        """Starts the update; returns a function that waits for its end. New weights go to the device's copy, or, if the
        unit is streamed, to the gradients' place."""
        if not self._may_apply(step, unit, starts, part):
            return lambda: None
        page, streamed = self.exchange.staging[unit.index], unit.index in self.engine.on_host
        home = None if streamed else self.exchange.kept(unit.index).data[part.begin : part.end]
        tensors = [*self.state.of(unit, part.begin, part.end), page[part.begin : part.end]]
        numel, element = tensors[0].numel(), page.element_size()
        self._numel += numel
        self._up += numel * (12 + element - (0 if streamed else 4))  # the exchange has already counted a master
        self._down += numel * (12 + (element if streamed else 0))
        self.state.count(part)
        if self.lane is None or not numel:
            if numel:
                self.state.update(unit, part, page, step.lr, step.clip)
            if home is not None:
                home.copy_(tensors[3])
            return lambda: None
        rule = self.state.rule
        beta1, beta2, eps = rule["beta1"], rule["beta2"], rule["eps"]

        def change(begin: int, chunks: list[torch.Tensor]) -> None:
            weight = chunks[3] if home is None else home[begin : begin + chunks[3].numel()]
            assert self.squares is not None
            adamw_(
                chunks[0], chunks[1], chunks[2], chunks[3], weight, squares=self.squares,
                step=part.step, weight_decay=part.weight_decay, lr=step.lr, clip=step.clip,
                beta1=beta1, beta2=beta2, eps=eps,
            )  # fmt: skip

        return self.lane.run(tensors, back=4 if streamed else 3, change=change)
