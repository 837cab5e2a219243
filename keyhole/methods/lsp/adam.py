"""Adam on compressed gradients: each step overwrites its gradient. On the device, or on the CPU beside it.

    m <- b1 m + (1 - b1) g     v <- b2 v + (1 - b2) g^2     g <- - m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

torch's fused AdamW updates a parameter: w <- (1 - rate decay) w - rate (m ...). If it is called with the gradient as
the parameter, rate 1 and decay 1, it leaves just the step: the first factor is 0, and every element of w and g is read
before that of w is written, in the CPU kernel and in the GPU kernel. So no buffer is zeroed before and none copied
after: a number costs 12 bytes read and 12 written, in one pass, whatever the size of the caches. The bits are those of
a parameter of zeros updated with rate 1 and no decay (a test).

On the CPU, clipping divides the gradient by the kernel's own `grad_scale`. The GPU kernel would write the scaled
gradient back over the step, so there the gradient is multiplied before.

On the device (DeviceAdam) all targets of a unit are one launch. The clip factor and the skip flag (a non-finite
gradient) are there too, so the host never waits, and so is t, the number of updates of a target, since only the device
knows which updates were skipped. Bytes: 8 per number for the moments. With clipping by the global norm, every unit's
gradient waits for that norm in a buffer of its own: 4 more.

In host memory (HostAdam) the CPU updates block by block, overlapping with the GPU:

    down       compressed gradients -> their staging buffers (page-locked, float32), after the kernels so far
    worker     staging: gradient -> step, in place, with m and v: one call for all targets
    up         a unit's staging -> one of SLOTS device buffers
    compute    waits only for that copy, and applies the step; then the slot is free

Bytes: on the host 12 per number (m, v, staging); on the device SLOTS buffers of the largest unit. For a layer of a 7B
Llama with d = 2048 (29 M numbers): 0.12 GB each way over the link, and 24 bytes per number through host memory for
Adam, 0.7 GB. Copies are float32, since the CPU kernel needs one dtype, and casts take longer than they save.

Down and worker take the units of a block together: each costs the launching thread some 0.7 ms, whatever its size. Of
the gradients that have arrived, those of the unit that the next forward pass needs first are taken first. If a gradient
is not finite, the steps of its block are nan, which leaves the weights unchanged, without decay (ops/), and their
moments do not change.
"""

import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from keyhole.machine.gpu import accelerator
from keyhole.methods.lsp.target import Target, Targets
from keyhole.methods.states import States
from keyhole.offload.downlink import Downlink
from keyhole.offload.engine import Engine
from keyhole.offload.slots import lend
from keyhole.offload.workers import Workers, default_threads

Tensors = list[torch.Tensor]
Views = tuple[Tensors, Tensors, Tensors, Tensors]
MOMENTS = ("exp_avg", "exp_avg_sq")
SLOTS = 2  # units whose steps are being uploaded


def adam_delta_(
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    rule: dict[str, float],
    *,
    clip: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
) -> None:
    """Replaces every gradient by Adam's step, with its sign, and updates the moments. All are float32 on one device;
    steps: the number of updates of each, this one included. clip: a factor of the gradients. skip: 1.0 leaves the
    moments unchanged; the caller writes nan in place of the steps."""
    divisor = None
    if clip is not None and clip.is_cuda:
        torch._foreach_mul_(grads, clip)
    elif clip is not None:
        divisor = 1.0 / clip
    how: dict[str, Any]
    how = {"lr": 1.0, "weight_decay": 1.0, "amsgrad": False, "maximize": False, **rule}
    torch._fused_adamw_(grads, grads, exp_avgs, exp_avg_sqs, [], steps, grad_scale=divisor, found_inf=skip, **how)


class Moments:
    """Moments of Adam, by unit, and for each target the number of its updates, where the moments are. lengths: of the
    buffers of these units."""

    def __init__(
        self, targets: Targets, lengths: dict[int, int], rule: dict[str, float], device: torch.device | None = None
    ) -> None:
        self.lengths, self.rule = {unit: lengths[unit] for unit in targets}, rule
        self.states = States(self.lengths, MOMENTS, device=device)
        names = [target.name for members in targets.values() for target in members]
        self.counts = dict(zip(names, torch.zeros(len(names), device=device).unbind(), strict=True))

    def of(self, target: Target) -> list[torch.Tensor]:
        """m and v of a target, as views. Drain first."""
        return [target.view_in(flat) for flat in self.states.of(target.unit)]

    def views(self, targets: list[Target], grads: list[torch.Tensor]) -> Views:
        """For the kernel: gradients, m, v and counts of targets. grads: of their units."""
        own = [target.view_in(grad) for target, grad in zip(targets, grads, strict=True)]
        m, v = ([self.of(target)[k] for target in targets] for k in range(2))
        return own, m, v, [self.counts[target.name] for target in targets]


class DeviceAdam(Moments):
    """Moments on the device. waits: gradients wait for the norm."""

    def __init__(
        self, targets: Targets, lengths: dict[int, int], rule: dict[str, float], device: torch.device, waits: bool
    ) -> None:
        super().__init__(targets, lengths, rule, device)
        self.waiting = {u: torch.empty(n, device=device) for u, n in self.lengths.items() if waits}

    def deltas_(self, targets: list[Target], grad: torch.Tensor, clip: torch.Tensor | None, skip: torch.Tensor) -> None:
        """Replaces the gradients of these targets of a unit by their steps. skip: 1.0 changes nothing; a step of nan
        leaves its weight unchanged."""
        grads, m, v, counts = self.views(targets, [grad] * len(targets))
        torch._foreach_add_(counts, 1.0)
        adam_delta_(grads, m, v, counts, self.rule, clip=clip, skip=skip)
        torch._foreach_sub_(counts, [skip] * len(counts))
        grad.masked_fill_(skip.bool(), float("nan"))


@dataclass(frozen=True)
class DecidingNorm:
    """The norm that decides whether units are updated, and how they are clipped: a number on the host that has arrived
    before the worker starts. outcomes: receives whether they were updated."""

    norm: torch.Tensor
    limit: float | None
    outcomes: list[bool]


class HostAdam(Moments):
    """Moments in host memory, and the worker that updates them. groups: unit -> its group, updated together."""

    def __init__(
        self,
        targets: Targets,
        lengths: dict[int, int],
        rule: dict[str, float],
        groups: dict[int, Hashable],
        engine: Engine,
        threads: int | None,
    ) -> None:
        super().__init__(targets, lengths, rule)
        self.groups = {unit: groups[unit] for unit in targets}
        self.group_sizes = Counter(self.groups.values())
        self.device, self.cuda = engine.device, engine.cuda
        staging = States(self.lengths, ["staging"])
        for flat in (*self.states.arrays.values(), *staging.arrays.values()):
            flat.zero_()
        if self.cuda:
            staging.pin(self.device)
        self.staging = {unit: staging.of(unit)[0] for unit in self.lengths}
        self.pool = Workers(threads or default_threads(launches_all_the_time=True))
        self.kept: dict[int, tuple[list[str], Views]] = {}  # views, by first unit
        self.wait_s = 0.0  # how long the launching thread has waited for the worker
        self.update_s = 0.0  # how long the worker has updated
        self.down = Downlink(engine)
        up: Any = accelerator.Stream(engine.device) if engine.cuda else None
        self.up = up
        self.slots = [torch.empty(max(self.lengths.values()), device=engine.device) for _ in range(SLOTS)]
        self.idle = list(range(SLOTS))  # slots
        self.coming: dict[int, int] = {}  # unit -> slot
        if self.cuda:
            for buffer in self.slots:
                lend(buffer, [self.up])
            self.free, self.arrived = ([accelerator.Event() for _ in self.slots] for _ in range(2))

    def submit(self, targets: Targets, deciding: DecidingNorm) -> None:
        """Queues the update of units of one group whose gradients were sent to their staging."""
        first = next(iter(targets))
        job = partial(self._update, targets, deciding)
        self.pool.submit(job, page=self.groups[first], after=self.down.sent(), urgency=first)

    def _update(self, targets: Targets, deciding: DecidingNorm) -> None:
        """In the worker."""
        begin_s = time.perf_counter()
        finite = bool(torch.isfinite(deciding.norm))
        if finite:
            members = [target for group in targets.values() for target in group]
            names, first = [target.name for target in members], members[0].unit
            if first not in self.kept or self.kept[first][0] != names:  # else: while the worker makes views, the
                sums = [self.staging[target.unit] for target in members]  # launching thread waits for Python's lock
                self.kept[first] = names, self.views(members, sums)
            (grads, m, v, counts), limit = self.kept[first][1], deciding.limit
            torch._foreach_add_(counts, 1.0)
            clip = None if limit is None else (limit / (deciding.norm + 1e-6)).clamp(max=1.0)
            adam_delta_(grads, m, v, counts, self.rule, clip=clip)
        else:
            for unit in targets:
                self.staging[unit].fill_(float("nan"))
        deciding.outcomes.append(finite)
        self.update_s += time.perf_counter() - begin_s

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
        with accelerator.stream(self.up):
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
            accelerator.current_stream(self.device).wait_event(self.arrived[slot])
        return self.slots[slot][: self.lengths[unit]]

    def used(self, unit: int) -> None:
        """The kernels launched so far have used the unit's steps: its slot is free after them."""
        slot = self.coming.pop(unit)
        self.idle.append(slot)
        if self.cuda:
            self.free[slot].record(accelerator.current_stream(self.device))

    def drain(self) -> None:
        """Waits for the worker, and for copies from and to host memory."""
        self.pool.drain()
        self.down.synchronize()
        if self.cuda:
            self.up.synchronize()
