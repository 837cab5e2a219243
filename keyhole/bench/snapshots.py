"""`keyhole bench snapshots`: what a checkpoint every few steps costs a zeroth-order run, and how fast a journal is
replayed: Table 6 of the ZO-Offloading paper.

    none                  streamed steps without checkpoints
    background            a background checkpoint every `every` steps (checkpoint/writer.py)
    torch.save            training stops, and torch.save writes the weights
    textbook              MeZO's loop in GPU memory (baselines.py), without checkpoints
    textbook torch.save   the same, stopped for torch.save, which also copies the weights from the GPU
    replay                a journal of so many steps is applied to the model

A period is `every` steps. A mode is timed from the start of its first checkpoint to the point where the one after the
last period could start, including any wait for the disk: this is the pace of a long run. keyhole's checkpoints have
checksums and are flushed to the disk; torch.save's have no checksums and are not flushed. If the disk cannot write one
checkpoint in the time of one period, it bounds the run in every mode, so choose the batch accordingly

    seconds per step x every >= bytes of the weights / bytes per second of the disk         (1.3 GB/s: batch 16)

The floor of a mode with checkpoints is the longer of a period without checkpoints, and the weights at the disk's own
rate, which is measured in the same run. Host memory is the peak resident set, beside that of `none`, without the
kernel's page cache. "half GiB" is half of the weights, the limit for copies.
"""

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.cases import STREAMED, TEXTBOOK, Case
from keyhole.bench.process import Emit, Job
from keyhole.bench.report import Columns, Record, Report, number, table_of
from keyhole.bench.shapes import known
from keyhole.bench.steps import batches_of, load, method_of
from keyhole.checkpoint import journal, select
from keyhole.checkpoint.replay import apply_records
from keyhole.checkpoint.snapshot import PIECE_BYTES, WORKERS, write_at
from keyhole.checkpoint.state import State, verify
from keyhole.checkpoint.writer import Writer
from keyhole.machine.sizes import GIB

LR = 1e-7
PROBE_BYTES = 4 * GIB  # upper limit of what is written to measure the disk
NONE, BACKGROUND, TORCH, REPLAY = "none", "background", "torch.save", "replay"
MODES = (NONE, BACKGROUND, TORCH, TEXTBOOK, f"{TEXTBOOK} {TORCH}", REPLAY)


@dataclass(frozen=True)
class Saving:
    """A mode of a model."""

    model: str
    mode: str
    batch: int
    every: int  # steps between checkpoints
    periods: int  # checkpoints that are timed
    replay_steps: int
    scratch: str | None  # directory for the checkpoints

    @property
    def name(self) -> str:
        return f"{self.model} {self.mode}"

    @property
    def group(self) -> str:
        return self.model


def cases_of(models: list[str], batch: int, every: int, periods: int, replay: int, scratch: str | None) -> list[Saving]:
    """All modes of every model; the first one is replayed."""
    found = [
        Saving(known(m, "--sizes"), mode, batch, every, periods, replay, scratch) for m in models for mode in MODES
    ]
    return [case for case in found if case.mode != REPLAY or (replay and case.model == found[0].model)]


def measure_saving(case: Saving, job: Job, emit: Emit) -> Record:
    """The pace of a mode."""
    device, system = measure.device_of(job.device), TEXTBOOK if case.mode.startswith(TEXTBOOK) else STREAMED
    steps = Case(case.model, system, batch=case.batch)
    model = load(steps, job.device, job.quick)
    weights_bytes = sum(home.nbytes for home in model.engine.homes)
    batches, method = batches_of(steps, job.quick, model.config.vocab_size), method_of(steps, model)
    if case.scratch is not None:
        Path(case.scratch).mkdir(parents=True, exist_ok=True)

    def run(count: int) -> None:
        for _ in range(count):
            method.step(batches)

    def tensors() -> Record:
        if system == TEXTBOOK:
            return dict(model.module.state_dict())
        model.apply_deferred()
        return dict(model.named_tensors())

    with tempfile.TemporaryDirectory(dir=case.scratch, prefix="keyhole-bench-") as scratch:
        run(3)
        measure.wait(device)
        rate = disk_rate(Path(scratch), weights_bytes)
        measure.clean_up(device)
        if isinstance(method, keyhole.ZO) and case.mode == REPLAY:
            found = time_replay(method, case.replay_steps)
        elif isinstance(method, keyhole.ZO) and case.mode == BACKGROUND:
            found = time_background(case, method, run, Path(scratch))
        else:
            found = time_steps(case, device, run, tensors, Path(scratch))
    found |= {"weights_bytes": weights_bytes, "disk_bytes_per_s": rate}
    found["tokens_per_s"] = found["steps"] * batches[0]["input_ids"].numel() / found["wall_s"]
    found |= {"host_bytes": measure.host_memory(), "device": measure.device_memory(device)}
    model.close()
    return found


def time_steps(
    case: Saving, device: torch.device, run: Callable[[int], None], tensors: Callable[[], Record], scratch: Path
) -> Record:
    """A period; in the modes of torch.save, the only place where keyhole writes a pickle, the weights before it."""
    begin_s, written = time.perf_counter(), list[float]()
    if case.mode.endswith(TORCH):
        torch.save(tensors(), scratch / "baseline.pt")
        written.append(time.perf_counter() - begin_s)
    run(case.every)
    measure.wait(device)
    return {"steps": case.every, "wall_s": time.perf_counter() - begin_s} | ({"write_s": written} if written else {})


def time_background(case: Saving, method: keyhole.ZO, run: Callable[[int], None], scratch: Path) -> Record:
    """One checkpoint per period; each is verified afterwards, or deleted when the next one is complete."""
    background, done, step = Writer(method.model, method), [], 0
    begin_s = time.perf_counter()
    for _ in range(case.periods):
        background.begin(scratch / f"checkpoint-{step}", State(step))
        run(case.every)
        written = background.wait()
        assert written is not None
        done.append(written)
        if written.error is not None:
            raise written.error
        deleting, step = select.prune(scratch, 1, step), step + case.every
    measure.wait(method.model.device)
    wall_s = time.perf_counter() - begin_s
    deleting.join()
    verify(done[-1].path)
    shutil.rmtree(done[-1].path)
    return {
        "steps": step,
        "wall_s": wall_s,
        "write_s": [d.seconds for d in done],
        "training_waited_s": [d.snapshot.waited_s for d in done],
        "copies_bytes": max(d.snapshot.peak_bytes for d in done),
        "pool_bytes": background.pool_bytes,
    }


def time_replay(method: keyhole.ZO, steps: int) -> Record:
    """A journal of this many steps is applied in place."""
    rng, kind = random.Random(0), method.model.device.type
    numbers = [(i, (LR, rng.gauss(0.0, 1.0))) for i in range(method.step_count + 1, method.step_count + steps + 1)]
    method.flush()
    records = [journal.Record(step, 0, 0, 0, 0.0, kind, coef) for step, coef in numbers]
    return {"steps": steps, "wall_s": apply_records(method, records)}


def disk_rate(directory: Path, size_bytes: int) -> float:
    """Bytes per second of a file of about this size, written and flushed by as many threads as a snapshot's, but
    without checksums. Its bytes are random, since some file systems are faster with repeated ones."""
    pieces = max(WORKERS, min(size_bytes, PROBE_BYTES) // PIECE_BYTES)
    data, path = memoryview(os.urandom(PIECE_BYTES)), directory / "probe"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        begin_s = time.perf_counter()
        with ThreadPoolExecutor(WORKERS) as pool:
            for _ in pool.map(lambda piece: write_at(file, data, piece * PIECE_BYTES), range(pieces)):
                pass
        os.fdatasync(file)
        return pieces * PIECE_BYTES / (time.perf_counter() - begin_s)
    finally:
        os.close(file)
        path.unlink()


@dataclass(frozen=True)
class Line:
    """A mode beside the same steps without checkpoints, of the same loop, and beside MeZO's."""

    case: Record
    record: Record
    none: Record
    textbook: Record | None

    @property
    def ratio(self) -> float:
        return float(self.record["tokens_per_s"] / self.none["tokens_per_s"])

    @property
    def disk_s(self) -> float | None:
        """Seconds that the disk alone needs for the weights."""
        saves = "write_s" in self.record
        return self.record["weights_bytes"] / self.record["disk_bytes_per_s"] if saves else None

    @property
    def period_s(self) -> float:
        """Seconds of the steps between two checkpoints; `none` is timed over one period."""
        return float(self.record["wall_s"] / self.record["steps"] * self.none["steps"])

    @property
    def to_floor(self) -> float | None:
        return None if self.disk_s is None else self.period_s / max(self.none["wall_s"], self.disk_s)

    def gib(self, key: str, form: str = ".2f") -> str:
        return number(self.record[key] / GIB, form) if "copies_bytes" in self.record else ""


def _seconds(values: list[float]) -> str:
    return ", ".join(f"{s:.2f}" for s in values)


def _to_textbook(line: Line) -> str:
    return number(line.record["tokens_per_s"] / line.textbook["tokens_per_s"], ".3f", "x") if line.textbook else ""


def _host_more(line: Line) -> str:
    more = line.record["host_bytes"] - line.none["host_bytes"]
    return number(more / GIB, "+.2f") if "copies_bytes" in line.record else ""


COLUMNS: Columns[Line] = {
    "model": lambda line: line.case["model"],
    "batch": lambda line: str(line.case["batch"]),
    "mode": lambda line: line.case["mode"],
    "tok/s": lambda line: f"{line.record['tokens_per_s']:,.0f}",
    "against none": lambda line: f"{line.ratio:.3f}x",
    "against textbook": _to_textbook,
    "written in s": lambda line: _seconds(line.record.get("write_s", [])),
    "disk's floor s": lambda line: number(line.disk_s),
    "period s": lambda line: f"{line.period_s:.2f}",
    "vs floor": lambda line: number(line.to_floor, unit="x"),
    "training waited s": lambda line: _seconds(line.record.get("training_waited_s", [])),
    "copies GiB": lambda line: line.gib("copies_bytes"),
    "half GiB": lambda line: number(line.record["weights_bytes"] / 2 / GIB) if line.gib("copies_bytes") else "",
    "host GiB more": _host_more,
    "GPU GiB": lambda line: number(line.record["device"]["reserved_bytes"] / GIB or None),
}


def lines_of(records: list[Record]) -> list[Line]:
    """The modes that were measured, with the steps that they are compared with."""
    found = {(r["case"]["model"], r["case"]["mode"]): r for r in records if r.get("status") == "ok"}
    lines = []
    for (model, mode), record in found.items():
        none, textbook = (
            found.get((model, TEXTBOOK if mode.startswith(TEXTBOOK) else NONE)),
            found.get((model, TEXTBOOK)),
        )
        if none is not None and mode != REPLAY:
            lines.append(Line(record["case"], record, none, textbook))
    return lines


class SnapshotReport(Report):
    """A line per mode."""

    def sections(self) -> list[str]:
        replays = [r for r in self.ok().values() if r["case"]["mode"] == REPLAY]
        told = [f"{r['name']}: {r['steps']} steps in {r['wall_s']:.2f} s" for r in replays]
        return [(__doc__ or "").strip().split("\n\n", 1)[1], table_of(COLUMNS, lines_of(self.records)), *told]

    def line(self, found: Record) -> str:
        if found.get("status") != "ok":
            return super().line(found)
        written = f"; written in {statistics.mean(found['write_s']):.2f} s" if "write_s" in found else ""
        return f"{found['name']:<26} {found['tokens_per_s']:10,.0f} tok/s, {found['wall_s']:.2f} s{written}"
