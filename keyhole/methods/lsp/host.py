"""Adam on what LSP compressed, moments in host memory, updated there by the CPU, unit by unit beside the GPU's work.

    down       the unit's compressed gradient -> its staging buffer (page-locked, float32), after the kernels so far
    worker     staging: gradient -> step, in place, with m and v (adam.py): one call for all pieces of the unit
    up         staging -> one of SLOTS device buffers
    compute    waits for that copy only, and applies the step; then the slot may take the next

Bytes: on the host 12 a number (m, v, staging); on the device SLOTS buffers of the largest unit. For a layer of a 7B
Llama with d = 2048 (29 M numbers): 0.12 GB each way, and 24 bytes a number through the host's memory for Adam, 0.7 GB.

The wire is float32. In bfloat16 it would be 2 + 2 bytes on the link instead of 4 + 4 and 20 through memory instead of
24, but the CPU's kernel wants one dtype, so chunks would be cast in and out: on one core 101 ms a layer, against 59 in
place (benchmarks/ops_lsp.py --host). The link is not what is short, and so the steps are those of moments on the
device, up to the rounding of two kernels.

Order of the jobs: schedule.py. A gradient that is not finite: its unit's step is nan, by which weights
stay as they are, not even decayed (ops/), and its moments stay.
"""

import time
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.machine.host import host_memory
from keyhole.machine.sizes import GIB
from keyhole.methods.lsp.adam import adam_delta_
from keyhole.methods.lsp.gather import Pieces, seen
from keyhole.methods.lsp.memory import SLOTS
from keyhole.methods.lsp.piece import Piece
from keyhole.methods.lsp.schedule import transition, urgency
from keyhole.methods.lsp.spans import Spans
from keyhole.offload import arena
from keyhole.offload.workers import Workers, default_threads


class HostAdam:
    """See the top of this file. layers: unit -> its place in the order of the forward, blocks counted from 0."""

    def __init__(self, pieces: Pieces, lengths: dict[int, int], device: torch.device, rule: dict[str, float],
                 layers: dict[int, int], layer_count: int, spans: Spans, threads: int | None) -> None:  # fmt: skip
        self.lengths, self.device, self.cuda = {unit: lengths[unit] for unit in pieces}, device, device.type == "cuda"
        self.rule, self.layers, self.layer_count, self.spans = rule, layers, layer_count, spans
        self._reserve()
        self.pool = Workers(threads or default_threads(launches_all_the_time=True))
        self.counts = {piece.name: 0 for members in pieces.values() for piece in members}
        self.wait_s = 0.0  # how long the launching thread has waited for the worker
        self.slots = [torch.empty(max(self.lengths.values()), device=device) for _ in range(SLOTS)]
        self.idle, self.coming = list(range(SLOTS)), {}  # slots; unit -> slot
        self.down = self.up = None
        if self.cuda:
            self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self.free, self.there = ([torch.cuda.Event() for _ in self.slots] for _ in range(2))
        self.started: list[Any] = [None] * SLOTS  # when the copy into a slot began

    def _reserve(self) -> None:
        total = sum(self.lengths.values())
        missing = 12 * total - host_memory().available_bytes
        if missing > 0:
            raise UserError(
                f"lsp: moments and gradients in host memory take {12 * total / GIB:.2f} GiB, {missing / GIB:.2f} GiB "
                "more than is free; choose a smaller lsp.d, or lsp.others=frozen"
            )
        flats = [arena.host_memory(4 * total).view(torch.float32).zero_() for _ in range(3)]
        if self.cuda:
            arena.pin(flats[2].view(torch.uint8), self.device)
        sizes = list(self.lengths.values())
        self.m, self.v, self.staging = (dict(zip(self.lengths, flat.split(sizes), strict=True)) for flat in flats)

    # -- down ------------------------------------------------------------------------------------------------------

    def small(self, count: int) -> torch.Tensor:
        """A few numbers on the host that `send` can reach."""
        return torch.zeros(count, pin_memory=self.cuda)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies a small tensor to the host, after the kernels so far."""
        if not self.cuda:
            target.copy_(source)
            return
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.down):
            target.copy_(source, non_blocking=True)
        source.record_stream(self.down)

    def leave(self, unit: int, grad: torch.Tensor) -> None:
        """The unit's gradient is whole: it goes. Its memory may be used again behind `down`."""
        if not self.cuda:
            self.staging[unit].copy_(grad)
            return
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.down), self.spans.of("down"):
            self.staging[unit].copy_(grad, non_blocking=True)

    def submit(
        self, unit: int, given: list[Piece], number: torch.Tensor, limit: float | None, told: list[bool]
    ) -> None:
        """Has the worker make the unit's steps. number: norm of the gradient that decides, on the host by then; told:
        gets whether the unit was updated."""
        after = None
        if self.cuda:
            after = torch.cuda.Event(blocking=True)
            after.record(self.down)
        times = {name: self.spans.mean(name) for name in ("reverse", "down", "up", "update")}
        rank = urgency(self.layers[unit], self.layer_count, transition(self.layer_count, **times))
        self.pool.submit(lambda: self._update(unit, given, number, limit, told), page=unit, after=after, urgency=rank)

    # -- in the worker ---------------------------------------------------------------------------------------------

    def _update(self, unit: int, given: list[Piece], number: torch.Tensor, limit: float | None,
                told: list[bool]) -> None:  # fmt: skip
        begin_s = time.perf_counter()
        if not torch.isfinite(number):
            self.staging[unit].fill_(float("nan"))
            told.append(False)
            return
        for piece in given:
            self.counts[piece.name] += 1
        flats = ([seen(flat[unit], piece) for piece in given] for flat in (self.staging, self.m, self.v))
        steps = [torch.tensor(float(self.counts[piece.name])) for piece in given]
        clip = None if limit is None else (limit / (number + 1e-6)).clamp(max=1.0)
        adam_delta_(*flats, steps, self.rule, clip=clip)
        told.append(True)
        self.spans.add("update", time.perf_counter() - begin_s)

    # -- up --------------------------------------------------------------------------------------------------------

    def fetch(self, unit: int) -> bool:
        """Starts to bring the unit's steps up, if they are there and a slot is; never waits. True: on their way."""
        if unit in self.coming:
            return True
        if not self.idle or not self.pool.ready(unit):
            return False
        self.coming[unit] = slot = self.idle.pop(0)
        target = self.slots[slot][: self.lengths[unit]]
        if not self.cuda:
            target.copy_(self.staging[unit])
            return True
        with torch.cuda.stream(self.up):
            self.up.wait_event(self.free[slot])
            with self.spans.of("up") as self.started[slot]:
                target.copy_(self.staging[unit], non_blocking=True)
            self.there[slot].record()
        return True

    def deltas(self, unit: int) -> torch.Tensor:
        """The unit's steps, on the device for kernels that are launched now. Call `used` behind them."""
        begin, begin_s = self.spans.mark(), time.perf_counter()
        self.pool.wait(unit)
        self.wait_s += time.perf_counter() - begin_s
        if unit not in self.coming and not self.idle:  # slots hold what was brought for others: one gives way
            self.idle.append(self.coming.pop(next(iter(self.coming))))
        self.fetch(unit)
        slot = self.coming[unit]
        if self.cuda:
            torch.cuda.current_stream(self.device).wait_event(self.there[slot])
            self.spans.stalled(begin, self.started[slot])
        else:
            self.spans.add("exposed update", time.perf_counter() - begin_s)
        return self.slots[slot][: self.lengths[unit]]

    def used(self, unit: int) -> None:
        """The kernels so far have used the unit's steps: its slot is free behind them."""
        slot = self.coming.pop(unit)
        self.idle.append(slot)
        if self.cuda:
            self.free[slot].record(torch.cuda.current_stream(self.device))

    # -- between steps ---------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Waits for the worker, and for copies from and to host memory."""
        self.pool.drain()
        if self.cuda:
            self.down.synchronize()
            self.up.synchronize()

    def moments(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """m and v of a piece, as views. Drain first."""
        return seen(self.m[piece.unit], piece), seen(self.v[piece.unit], piece)

    def count(self, piece: Piece) -> int:
        """Updates so far. Drain first."""
        return self.counts[piece.name]

    def set_count(self, piece: Piece, count: int) -> None:
        self.counts[piece.name] = count

    def close(self) -> None:
        """Ends the worker; jobs that have not begun are dropped."""
        self.pool.close()
