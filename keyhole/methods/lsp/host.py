"""Adam on compressed gradients with moments in host memory; the CPU updates block by block, overlapping with the GPU.

    down       compressed gradients -> their staging buffers (page-locked, float32), after the kernels so far
    worker     staging: gradient -> step, in place, with m and v (adam.py): one call for all targets
    up         a unit's staging -> one of SLOTS device buffers
    compute    waits only for that copy, and applies the step; then the slot is free

Bytes: on the host 12 per number (m, v, staging); on the device SLOTS buffers of the largest unit. For a layer of a 7B
Llama with d = 2048 (29 M numbers): 0.12 GB each way over the link, and 24 bytes per number through host memory for
Adam, 0.7 GB.

Copies are float32. In bfloat16 they would take 2 + 2 bytes on the link instead of 4 + 4, and 20 through host memory
instead of 24, but the CPU kernel needs one dtype, so chunks would have to be cast: on one core 101 ms per layer,
against 59 in place. The link is not the bottleneck. So the steps equal those with
moments on the device, up to the rounding of two kernels.

Down and worker take the units of a block together, because each costs the launching thread some 0.7 ms, whatever its
size: a Llama-3.5B with blocks cut in five had 85 of them, and its backward pass waited for launches (0.19 to 0.22 s
instead of 0.16 with all moments on the GPU).

Of the gradients that have arrived, those of the unit that the next forward pass needs first are taken first. If a
gradient is not finite, the steps of its block are nan, which leaves the weights unchanged, without decay (ops/), and
their moments do not change.
"""

import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.machine.host import host_memory
from keyhole.machine.sizes import GIB
from keyhole.methods.lsp.adam import MOMENTS, Tensors, adam_delta_
from keyhole.methods.lsp.memory import SLOTS
from keyhole.methods.lsp.target import ALL, Share, Target, Targets
from keyhole.methods.states import States
from keyhole.offload.downlink import Downlink
from keyhole.offload.engine import Engine
from keyhole.offload.slots import lend
from keyhole.offload.workers import Workers, default_threads


@dataclass(frozen=True)
class DecidingNorm:
    """The norm that decides whether units are updated, and how they are clipped: a number on the host that has arrived
    before the worker starts. outcomes: receives whether they were updated."""

    norm: torch.Tensor
    limit: float | None
    outcomes: list[bool]


class HostAdam:
    """Moments in host memory, by unit, and the worker that updates them. groups: unit -> its group, updated together;
    share: the part of them that this rank has."""

    def __init__(
        self,
        targets: Targets,
        lengths: dict[int, int],
        groups: dict[int, Hashable],
        engine: Engine,
        rule: dict[str, float],
        threads: int | None,
        share: Share = ALL,
    ) -> None:
        self.lengths, self.share = {unit: share.numel(lengths[unit]) for unit in targets}, share
        self.groups = {unit: groups[unit] for unit in targets}
        self.group_sizes = Counter(self.groups.values())
        self.device, self.cuda = engine.device, engine.cuda
        self.rule = rule
        self._reserve()
        self.pool = Workers(threads or default_threads(launches_all_the_time=True))
        self.counts = {target.name: 0 for members in targets.values() for target in members}
        self.views: dict[int, tuple[list[str], tuple[list[Target], Tensors, Tensors, Tensors]]] = {}  # by first unit
        self.step: tuple[int, torch.Tensor] | None = None
        self.wait_s = 0.0  # how long the launching thread has waited for the worker
        self.update_s = 0.0  # how long the worker has updated
        self.down = Downlink(engine)
        up: Any = torch.cuda.Stream(engine.device) if engine.cuda else None
        self.up = up
        self.slots = [torch.empty(max(self.lengths.values()), device=engine.device) for _ in range(SLOTS)]
        self.idle = list(range(SLOTS))  # slots
        self.coming: dict[int, int] = {}  # unit -> slot
        if self.cuda:
            for buffer in self.slots:
                lend(buffer, [self.up])
            self.free, self.arrived = ([torch.cuda.Event() for _ in self.slots] for _ in range(2))

    def _reserve(self) -> None:
        total = sum(self.lengths.values())
        missing = 12 * total - host_memory().available_bytes
        if missing > 0:
            raise UserError(
                f"lsp: moments and gradients in host memory take {12 * total / GIB:.2f} GiB, {missing / GIB:.2f} GiB "
                "more than is free; choose a smaller lsp.d, or lsp.others=frozen"
            )
        self.states = States(self.lengths, MOMENTS)
        staging = States(self.lengths, ["staging"])
        for flat in (*self.states.arrays.values(), *staging.arrays.values()):
            flat.zero_()
        if self.cuda:
            staging.pin(self.device)
        self.staging = {unit: staging.of(unit)[0] for unit in self.lengths}

    # -- down ------------------------------------------------------------------------------------------------------

    def send_gradients(self, grads: dict[int, torch.Tensor], norm: torch.Tensor, norm_here: torch.Tensor) -> None:
        """Sends complete gradients, by unit, and their norm to the host. Their memory may be reused after the copy."""
        copies = [(norm, norm_here), *((grad, self.staging[unit]) for unit, grad in grads.items())]
        self.down.send_all(copies)

    def submit(self, targets: Targets, deciding: DecidingNorm) -> None:
        """Queues the update of units of one group whose gradients were sent."""
        after, job, first = self.down.sent(), partial(self._update, targets, deciding), next(iter(targets))
        self.pool.submit(job, page=self.groups[first], after=after, urgency=first)

    # -- in the worker ---------------------------------------------------------------------------------------------

    def _update(self, targets: Targets, deciding: DecidingNorm) -> None:
        begin_s = time.perf_counter()
        if not torch.isfinite(deciding.norm):
            for unit in targets:
                self.staging[unit].fill_(float("nan"))
            deciding.outcomes.append(False)
            return
        members = [target for group in targets.values() for target in group]
        for target in members:
            self.counts[target.name] += 1
        here, *flats = self._views(members)
        steps = [self._step(self.counts[target.name]) for target in here]
        limit = deciding.limit
        clip = None if limit is None else (limit / (deciding.norm + 1e-6)).clamp(max=1.0)
        if here:
            grads, exp_avgs, exp_avg_sqs = flats
            adam_delta_(grads, exp_avgs, exp_avg_sqs, steps, self.rule, clip=clip)
        deciding.outcomes.append(True)
        self.update_s += time.perf_counter() - begin_s

    def _views(self, members: list[Target]) -> tuple[list[Target], Tensors, Tensors, Tensors]:
        """The targets of which this rank has numbers, and views of their staging, m and v. The views are kept from step
        to step: while the worker makes views, the launching thread waits for Python's lock."""
        names = [target.name for target in members]
        kept = self.views.get(members[0].unit)
        if kept is None or kept[0] != names:
            here = [target for target in members if self.share.has(target, self.staging[target.unit])]
            staging = [self.share.view_in(self.staging[target.unit], target) for target in here]
            m, v = ([self.moments(target)[k] for target in here] for k in range(2))
            self.views[members[0].unit] = kept = names, (here, staging, m, v)
        return kept[1]

    def _step(self, count: int) -> torch.Tensor:
        """The number of updates as the kernel takes it; most targets have the same."""
        if self.step is None or self.step[0] != count:
            self.step = count, torch.tensor(float(count))
        return self.step[1]

    # -- up --------------------------------------------------------------------------------------------------------

    def fetch(self, unit: int) -> bool:
        """Starts to upload the unit's steps, if they and a slot are ready; never waits. True: now or before."""
        if unit in self.coming:
            return True
        if not self.idle or not self.pool.ready(self.groups[unit]):
            return False
        self.coming[unit] = slot = self.idle.pop(0)
        buffer = self.slots[slot][: self.lengths[unit]]
        if not self.cuda:
            buffer.copy_(self.staging[unit])
            return True
        with torch.cuda.stream(self.up):
            self.up.wait_event(self.free[slot])
            buffer.copy_(self.staging[unit], non_blocking=True)
            self.arrived[slot].record()
        return True

    def deltas(self, unit: int) -> torch.Tensor:
        """The unit's steps on the device, for kernels launched from now on. Call `used` after them."""
        begin_s = time.perf_counter()
        self.pool.wait(self.groups[unit])
        self.wait_s += time.perf_counter() - begin_s
        if unit not in self.coming and not self.idle:  # slots hold steps of other units: one of them is freed
            self.idle.append(self.coming.pop(next(iter(self.coming))))
        self.fetch(unit)
        slot = self.coming[unit]
        if self.cuda:
            torch.cuda.current_stream(self.device).wait_event(self.arrived[slot])
        return self.slots[slot][: self.lengths[unit]]

    def used(self, unit: int) -> None:
        """The kernels launched so far have used the unit's steps: its slot is free after them."""
        slot = self.coming.pop(unit)
        self.idle.append(slot)
        if self.cuda:
            self.free[slot].record(torch.cuda.current_stream(self.device))

    # -- between steps ---------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Waits for the worker, and for copies from and to host memory."""
        self.pool.drain()
        self.down.synchronize()
        if self.cuda:
            self.up.synchronize()

    def moments(self, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
        """m and v of a target, as views: this rank's part. Drain first."""
        m, v = (self.share.view_in(flat, target) for flat in self.states.of(target.unit))
        return m, v

    def count(self, target: Target) -> int:
        """Number of updates so far. Drain first."""
        return self.counts[target.name]

    def set_count(self, target: Target, count: int) -> None:
        self.counts[target.name] = count

    def close(self) -> None:
        """Ends the worker; jobs that have not started are dropped."""
        self.pool.close()
