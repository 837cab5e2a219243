"""From gradients in host memory to new weights: the updates of adam-offload, as jobs for the CPU or the GPU.

A unit whose gradients were sent is cut into parts (state.py), and each part is a job: for the CPU in the worker, which
sends the new masters to the device, or for the GPU through its lane (gpu_updates.py). Both first check that the update
may be applied: if a norm is not finite, weights stay unchanged (method.py says which norm).
"""

import time
from functools import partial
from typing import Any

import torch

from keyhole.methods.adam_offload.exchange import Exchange
from keyhole.methods.adam_offload.gpu_updates import AdamLane
from keyhole.methods.adam_offload.state import AdamState, AdamStep, Part
from keyhole.model.structure.layout import Unit
from keyhole.offload.workers import Job


class UpdateJobs:
    """Creates the jobs that update units."""

    def __init__(self, state: AdamState, exchange: Exchange, lane: AdamLane | None) -> None:
        self.state, self.exchange, self.lane = state, exchange, lane
        self.host_s = 0.0  # CPU time of updates, since the caller set it to 0

    def submit(self, step: AdamStep, unit: Unit, starts: list[int], after: Any) -> None:
        """Queues a unit's update after the event `after`. starts: first elements of its tensors with a gradient."""
        step.submitted = True
        for part in self.state.parts(starts):
            job = partial(self.by_cpu, step, unit, starts, part)
            on_device = None if self.lane is None else partial(self.by_gpu, step, unit, starts, part)
            self.exchange.submit(unit.index, job, after, [(part.begin, part.end)], on_device)

    def write(self, unit: Unit, begin: int = 0, end: int | None = None) -> None:
        """Overwrites a gradient that is not used with the current weights."""
        if self._is_streamed(unit):
            self.state.write(unit, self.exchange.staging[unit.index], begin, end)

    # -- in the worker, and in its helper --------------------------------------------------------------------------

    def by_cpu(self, step: AdamStep, unit: Unit, starts: list[int], part: Part) -> None:
        """Overwrites the gradients in the staging buffer with new weights, or updates only the master."""
        begin_s, page = time.perf_counter(), self._page(step, unit, starts, part)
        if page is not None and part.begin < part.end:
            self.state.update(unit, part, page, step.lr, step.clip(), in_place=self._is_streamed(unit))
            self.host_s += time.perf_counter() - begin_s
        if page is not None:
            self.state.count(part)

    def by_gpu(self, step: AdamStep, unit: Unit, starts: list[int], part: Part) -> Job:
        """Starts the update; returns a function that waits for its end."""
        page = self._page(step, unit, starts, part)
        if page is None:
            return lambda: None
        assert self.lane is not None
        end = self.lane.update(unit, part, page, step.lr, step.clip())
        self.state.count(part)
        return end

    def _page(self, step: AdamStep, unit: Unit, starts: list[int], part: Part) -> torch.Tensor | None:
        """The staging buffer with the gradients; None, after writing weights there, if the update must be skipped."""
        if step.is_bad(starts):
            step.bad = True
            self.write(unit, part.begin, part.end)
            return None
        step.applied = True
        return self.exchange.staging[unit.index]

    def _is_streamed(self, unit: Unit) -> bool:
        return unit.index in self.exchange.engine.on_host
