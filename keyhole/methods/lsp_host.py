"""Adam on what LSP compressed, moments in host memory, updated there by the CPU, unit by unit beside the GPU's work.

    down       the unit's compressed gradient -> its staging buffer (page-locked, float32), after the kernels so far
    worker     staging: gradient -> delta, in place, with m and v; chunk by chunk, as in ops/host_adam.py
    up         staging -> one of SLOTS device buffers
    compute    waits for that copy only, and applies the delta; then the slot may take the next

The wire is float32, so that the numbers are those of the moments on the device, up to the rounding of the two kernels.
Bytes: on the host 12 a number (m, v, staging); on the device gradients on their way (two or three units) and SLOTS
buffers of the largest unit. For a Llama of 7B with d = 2048: 0.94 G numbers, 3.8 GB each way a step.

Order of the jobs: lsp_schedule.py. A gradient that is not finite: its unit's delta is 0 and its moments stay.
"""

import time
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.lsp_device import Pieces, place, seen
from keyhole.methods.lsp_piece import Piece
from keyhole.methods.lsp_schedule import Times, urgency
from keyhole.offload import arena
from keyhole.offload.workers import Workers
from keyhole.ops.host_adam import CHUNK_PER_THREAD
from keyhole.plan.host import host_memory

SLOTS = 3
GIB = 2**30


class HostAdam:
    """See the top of this file. layers: unit -> its place among the blocks, -1 for units in front of them."""

    on = "host"

    def __init__(self, pieces: Pieces, device: torch.device, rule: dict[str, float], layers: dict[int, int],
                 threads: int | None = None) -> None:  # fmt: skip
        self.lengths, self.device, self.cuda, self.rule = place(pieces), device, device.type == "cuda", rule
        self.layers, self.layer_count = layers, 1 + max(layers.values(), default=0)
        self._reserve()
        self.pool = Workers(threads)
        self.scratch = torch.empty(CHUNK_PER_THREAD * self.pool.threads)
        self.counts = {piece.name: 0 for members in pieces.values() for piece in members}
        self.leaving: dict[int, torch.Tensor] = {}
        self.times, self.wait_s = Times(), 0.0
        self._spent: list[float] = []
        self.slots = [torch.empty(max(self.lengths.values()), device=device) for _ in range(SLOTS)]
        self.idle, self.coming = list(range(SLOTS)), {}  # slots; unit -> slot
        self.skipped = self.applied = 0  # units of this step
        if self.cuda:
            self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self.free, self.there = ([torch.cuda.Event() for _ in self.slots] for _ in range(2))
            self._timed: dict[str, list[tuple[Any, Any]]] = {"down": [], "up": [], "reverse": []}

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

    def buffer(self, unit: int) -> torch.Tensor:
        """Where the unit's gradient is gathered, on the device."""
        if unit not in self.leaving:
            self.leaving[unit] = torch.empty(self.lengths[unit], device=self.device)
        return self.leaving[unit]

    def small(self, count: int) -> torch.Tensor:
        """A few numbers on the host that `send` can reach."""
        return torch.zeros(count, pin_memory=self.cuda)

    def send(self, source: torch.Tensor, target: torch.Tensor, name: str = "") -> None:
        """Copies to the host, after the kernels so far."""
        if not self.cuda:
            target.copy_(source)
            return
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.down), self._timing(name):
            target.copy_(source, non_blocking=True)
        source.record_stream(self.down)

    def leave(self, unit: int) -> None:
        """The unit's gradient is whole: it goes."""
        self.send(self.leaving.pop(unit), self.staging[unit], "down")

    def submit(self, unit: int, given: list[Piece], number: torch.Tensor, limit: float | None) -> None:
        """Has the worker make the unit's deltas. number: norm of the gradient that decides, on the host by then."""
        after = None
        if self.cuda:
            after = torch.cuda.Event(blocking=True)
            after.record(self.down)
        rank = urgency(self.layers[unit], self.layer_count, self.times.transition(self.layer_count))
        self.pool.submit(lambda: self._update(unit, given, number, limit), page=unit, after=after, urgency=rank)

    # -- in the worker ---------------------------------------------------------------------------------------------

    def _update(self, unit: int, given: list[Piece], number: torch.Tensor, limit: float | None) -> None:
        begin_s, norm = time.perf_counter(), float(number)
        if not torch.isfinite(number):
            self.staging[unit].zero_()
            self.skipped += 1
            return
        self.applied += 1
        clip = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        for piece in given:
            self.counts[piece.name] += 1
            flats = (seen(flat[unit], piece).view(-1) for flat in (self.staging, self.m, self.v))
            host_delta_(*flats, step=self.counts[piece.name], clip=clip, scratch=self.scratch, **self.rule)
        self._spent.append(time.perf_counter() - begin_s)

    # -- up --------------------------------------------------------------------------------------------------------

    def fetch(self, unit: int) -> bool:
        """Starts to bring the unit's deltas up, if they are there and a slot is; never waits. True: on their way."""
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
            with self._timing("up"):
                target.copy_(self.staging[unit], non_blocking=True)
            self.there[slot].record()
        return True

    def deltas(self, unit: int) -> torch.Tensor:
        """The unit's steps, on the device for kernels that are launched now. Call `used` behind them."""
        begin_s = time.perf_counter()
        self.pool.wait(unit)
        self.wait_s += time.perf_counter() - begin_s
        if unit not in self.coming and not self.idle:  # slots hold what was brought for others: one gives way
            self.idle.append(self.coming.pop(next(iter(self.coming))))
        self.fetch(unit)
        slot = self.coming[unit]
        if self.cuda:
            torch.cuda.current_stream(self.device).wait_event(self.there[slot])
        return self.slots[slot][: self.lengths[unit]]

    def used(self, unit: int) -> None:
        """The kernels so far have used the unit's deltas: its slot is free behind them."""
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
        return self.counts[piece.name]

    def set_count(self, piece: Piece, count: int) -> None:
        self.counts[piece.name] = count

    def close(self) -> None:
        self.pool.close()

    # -- times -----------------------------------------------------------------------------------------------------

    def _timing(self, name: str) -> "_Span":
        return _Span(self._timed[name] if name and self.cuda else None)

    def reverse_timed(self) -> "_Span":
        """A context around the reverse."""
        return _Span(self._timed["reverse"] if self.cuda else None)

    def learn_times(self) -> None:
        """Takes over what was measured in the last step, as far as it is known without waiting."""
        if self._spent:
            self.times.update_s, self._spent = sum(self._spent) / len(self._spent), []
        for name, pairs in self._timed.items() if self.cuda else ():
            done = [begin.elapsed_time(end) / 1e3 for begin, end in pairs if end.query()]
            if done:
                setattr(self.times, f"{name}_s", sum(done) / len(done))
            pairs.clear()


class _Span:
    """Two events around what is queued inside, on the current stream; nothing for None."""

    def __init__(self, found: list | None) -> None:
        self.found = found

    def __enter__(self) -> None:
        if self.found is not None:
            self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.begin.record()

    def __exit__(self, *_: object) -> None:
        if self.found is not None:
            self.end.record()
            self.found.append((self.begin, self.end))


def host_delta_(grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, *, step: int, clip: float, scratch: torch.Tensor,
                **rule: float) -> None:  # fmt: skip
    """grad becomes Adam's step (with its sign), m and v move on: flat float32 tensors on the host."""
    how = {"lr": 1.0, "weight_decay": 0.0, "amsgrad": False, "maximize": False, "found_inf": None, **rule}
    how["grad_scale"] = None if clip == 1.0 else torch.tensor(1.0 / clip)
    count = [torch.tensor(float(step))]
    for g, m_part, v_part in zip(*(flat.split(scratch.numel()) for flat in (grad, m, v)), strict=True):
        delta = scratch[: g.numel()].zero_()
        torch._fused_adamw_([delta], [g], [m_part], [v_part], [], count, **how)
        g.copy_(delta)
