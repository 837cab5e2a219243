"""The numbers of a step: read one step late, and checked.

A loss is a scalar on the device, and reading it waits for the step. So on a GPU the numbers of a step are read one step
late: while the host waits for step t, step t + 1 is already queued, and the device never idles. They are copied to
page-locked memory right after the step, so reading them waits for that step only and not for the one queued since. On
a CPU there is nothing to wait for. `drain` reads the remaining steps, before an evaluation, a save, or the end. Numbers
that were read go into metrics.jsonl, then, if they are finite, into the journal, then to page, trackers and display
(records.py). A kill between the first two leaves a line that the resumed run writes again; the other order would leave
a replayed step without its line.

A loss of NaN or infinity means that this batch, or the weights before it, are broken. Methods do not apply an update
computed from such a loss, so the weights are still those of the previous step. The run stops, and the message names the
step, the samples, and the last good checkpoint. In float16 a gradient may occasionally overflow although the loss is
finite: its update is skipped with a warning, and a run that skips MOST_SKIPS steps in a row stops too.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from keyhole.errors import NonFinite
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.machine.host import read_text
from keyhole.machine.sizes import GIB
from keyhole.model.batch import Batch
from keyhole.report.entries import Entry

MOST_SKIPS = 10


@dataclass(frozen=True)
class Reading:
    """Numbers of a step or of an evaluation, as metrics.jsonl has them. update: the vector that a journal records, of a
    finite step; position: in the data, after the step."""

    entry: Entry
    update: list[float] | None = None
    position: tuple[int, int] = (0, 0)

    @property
    def step(self) -> int:
        return int(self.entry["step"])


@dataclass
class QueuedStep:
    """A step that has been queued. entry: its line of metrics.jsonl, with a scalar on the device for every number that
    is not known yet; batch: its samples; update, position: as in `Reading`."""

    entry: Entry
    batch: str
    update: torch.Tensor | None = None
    position: tuple[int, int] = (0, 0)


class Recorder:
    """Reads records when their step is done, passes them to `note`, and stops at numbers that are not finite.

    warn is called with lines about skipped steps; way_back says which checkpoint to go back to.
    """

    def __init__(
        self,
        device: torch.device,
        note: Callable[[Reading], None],
        warn: Callable[[str], None],
        way_back: Callable[[], str],
    ) -> None:
        self.device, self.note, self.warn, self.way_back = device, note, warn, way_back
        self.lag = 1 if device.type == ACCELERATOR else 0
        self.queue: deque[tuple[QueuedStep, torch.Tensor, Stamp]] = deque()
        self.skips = 0
        self.clock = Stamp(device)

    def add(self, record: QueuedStep) -> None:
        """Adds the record of the step just queued; on a GPU, reads the one before it."""
        self.queue.append((record, self._send(record), Stamp(self.device)))
        self.drain(self.lag)

    def _send(self, record: QueuedStep) -> torch.Tensor:
        """The numbers of a record as one vector on the host; on a GPU the copy is asynchronous."""
        found = [*record.entry.values(), record.update]
        tensors = [each.detach() for each in found if isinstance(each, torch.Tensor)]
        numbers = torch.cat([each.reshape(-1).to(self.device, torch.float32) for each in tensors])
        if self.device.type != ACCELERATOR:
            return numbers
        return torch.empty(numbers.shape, pin_memory=True).copy_(numbers, non_blocking=True)

    def drain(self, left: int = 0) -> None:
        """Waits for the steps so far, but for the last few, and reads them."""
        while len(self.queue) > left:
            self._read(*self.queue.popleft())

    def restart_clock(self) -> None:
        """Excludes the time up to now from the next step (it was an evaluation or a save)."""
        self.clock = Stamp(self.device)

    def _read(self, record: QueuedStep, sent: torch.Tensor, done: "Stamp") -> None:
        seconds, self.clock = done.seconds_since(self.clock), done  # waits for the copy
        numbers = iter(sent.tolist())
        entry = {name: next(numbers) if isinstance(x, torch.Tensor) else x for name, x in record.entry.items()}
        bad = ", ".join(f"{name} is {x}" for name, x in entry.items() if name != "loss" and not math.isfinite(x))
        entry |= {"seconds": seconds, "tokens_per_second": entry["tokens"] / max(seconds, 1e-9)}
        broken = None if math.isfinite(entry["loss"]) else f"the loss is {entry['loss']}"
        if broken is None:
            self.skips = self.skips + 1 if bad else 0
            if bad:
                self.warn(f"warning: step {entry['step']}: {bad}; such an update is left out")
            broken = f"{bad}, for {self.skips} steps in a row" if self.skips >= MOST_SKIPS else None
        update = list(numbers) if record.update is not None and broken is None else None
        self.note(Reading(entry | memory_gib(self.device), update, record.position))
        if broken is not None:
            raise NonFinite(
                f"step {entry['step']}: {broken}; its update was not applied and nothing was overwritten\n"
                f"  batch: {record.batch}\n"
                f"  {self.way_back()}\n"
                "  likely: a learning rate that is too high (try a third of it), float16 (try dtype=bfloat16), or "
                "this batch"
            )


class Stamp:
    """A point in time; on a GPU an event in the stream, since the host runs ahead of the device."""

    def __init__(self, device: torch.device) -> None:
        self.at_s = time.perf_counter()
        self.event: accelerator.Event | None = None
        if device.type == ACCELERATOR:
            self.event = accelerator.Event(enable_timing=True)
            self.event.record(accelerator.current_stream(device))

    def seconds_since(self, earlier: "Stamp") -> float:
        """Waits for both points in time."""
        if self.event is None or earlier.event is None:
            return self.at_s - earlier.at_s
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event) / 1e3)


def token_count(batches: list[Batch]) -> int:
    """Tokens of a step, without padding if there is a mask."""
    masks = [b["attention_mask"] if "attention_mask" in b else torch.ones_like(b["input_ids"]) for b in batches]
    return sum(int(mask.sum()) for mask in masks)


def memory_gib(device: torch.device) -> dict[str, float]:
    """Peak memory of the GPU's allocator, or this process's memory now where there is no GPU."""
    if device.type == ACCELERATOR:
        return {"gpu_gib": round(accelerator.max_memory_allocated(device) / GIB, 3)}
    return {"host_gib": round(resident_bytes() / GIB, 3)}


def resident_bytes() -> int:
    """Resident memory of this process; 0 without /proc."""
    words = read_text(Path("/proc/self/statm")).split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else 0
