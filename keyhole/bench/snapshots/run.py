"""What a checkpoint every few steps costs a streamed zeroth-order run, and how fast a journal is replayed.

    none         steps alone; the journal is kept in all three modes
    background   a checkpoint begun every `every` steps, written while training goes on (checkpoint/snapshot/)
    torch.save   training stops, and torch.save writes the weights, as in Table 6 of the ZO-Offloading paper

A period is `every` steps. A mode is timed from the begin of its first checkpoint to the point where the one after the
last period could begin, i.e. including any wait for the disk: that is the pace of a run that goes on like this. Our
checkpoints have checksums and are flushed to the disk; torch.save's are neither. The disk must take the weights of one
checkpoint in the time of one period, or it bounds the run, whatever is done: choose the batch accordingly

    seconds per step x every >= bytes of the weights / bytes per second of the disk         (1.3 GB/s: batch 16)

The floor of `background` is the longer of the two: a period of `none`, and the weights at the disk's own rate, which is
measured in the same run (disk.py). Host memory is the peak resident set, beside that of `none`; the page cache is the
kernel's.
"""

import gc
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.process import Say, make_job
from keyhole.bench.shapes import POSITIONS, QUICK_SHRINK, opt_config
from keyhole.bench.snapshots.disk import disk_rate
from keyhole.bench.snapshots.report import SnapshotReport, one_line
from keyhole.checkpoint import select
from keyhole.checkpoint.files import About
from keyhole.checkpoint.journal import format as journal
from keyhole.checkpoint.journal.replay import apply_records
from keyhole.checkpoint.journal.writer import Writer
from keyhole.checkpoint.snapshot.background import Background
from keyhole.checkpoint.state import verify
from keyhole.machine.probe import environment
from keyhole.methods.base import Workload
from keyhole.methods.zo.traits import ZO
from keyhole.training.metrics import QueuedStep, Recorder

LR = 1e-7


@dataclass(frozen=True)
class Plan:
    """What is run on every size."""

    batch: int
    every: int  # steps between checkpoints
    periods: int  # checkpoints that are timed
    device: str
    quick: bool
    scratch: Path | None  # where checkpoints go meanwhile


class Loop:
    """Training as the trainer does it: records read a step late, the journal appended."""

    def __init__(self, model: keyhole.Model, batch: dict[str, torch.Tensor], scratch: Path) -> None:
        self.model, self.batch, self.scratch = model, batch, scratch
        self.method = keyhole.ZO(model, LR)
        self.step_count, self.seconds = 0, []
        header = journal.Header("", 0, "", 0, 1, "gaussian", "stochastic", 1e-3, "", None, [], [], {}, {}, {})
        self.journal = Writer(scratch / "journal", journal.create(scratch / "journal", header), 0)
        device = model.device
        self.recorder = Recorder(device, self._entry, print, lambda: None, self._note)

    def _entry(self, entry: dict[str, Any]) -> None:
        self.seconds.append(entry["seconds"])

    def _note(self, record: QueuedStep, update: list[float]) -> None:
        device = self.model.device.type
        self.journal.append(journal.Record(record.step, 0, 0, record.step, 0.0, device, tuple(update)))

    def step(self) -> None:
        self.step_count += 1
        loss = self.method.step(self.batch)
        record = QueuedStep(self.step_count, loss, LR, 0.0, 0, "", {}, self.method.journal_update())
        self.recorder.add(record)

    def settle(self, step: int) -> bool:
        if not self.journal.wait_for(step, 60.0):
            return False
        self.journal.sync()
        return True

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def wait(self) -> None:
        self.recorder.drain()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


def time_none(loop: Loop, every: int, periods: int) -> dict[str, Any]:
    loop.wait()
    begin_s = time.perf_counter()
    loop.run(every)
    loop.wait()
    return {"steps": every, "wall_s": time.perf_counter() - begin_s}


def time_background(loop: Loop, every: int, periods: int) -> dict[str, Any]:
    """One checkpoint per period; every one of them is verified afterwards or deleted when the next one is whole."""
    background = Background(loop.model, loop.method)
    done = []
    loop.wait()
    begin_s = time.perf_counter()
    for _ in range(periods):
        step = loop.step_count
        background.begin(loop.scratch / f"checkpoint-{step}", About(step, {}, {}, {}), loop.settle)
        loop.run(every)
        done.append(background.wait())
        if done[-1].error is not None:
            raise done[-1].error
        deleting = select.prune(loop.scratch, 1, step)
    loop.wait()
    wall_s = time.perf_counter() - begin_s
    deleting.join()
    verify(done[-1].path)
    shutil.rmtree(done[-1].path)
    return {
        "steps": every * periods,
        "wall_s": wall_s,
        "write_s": [d.seconds for d in done],
        "training_waited_s": [d.snapshot.waited_s for d in done],
        "copies_bytes": max(d.snapshot.peak_bytes for d in done),
        "pool_bytes": background.pool_bytes,
    }


def time_torch_save(loop: Loop, every: int, periods: int) -> dict[str, Any]:
    """The baseline. A pickle, and so nowhere but here."""
    loop.wait()
    begin_s = time.perf_counter()
    loop.method.flush()
    torch.save(dict(loop.model.named_tensors()), loop.scratch / "baseline.pt")
    save_s = time.perf_counter() - begin_s
    loop.run(every)
    loop.wait()
    wall_s = time.perf_counter() - begin_s
    (loop.scratch / "baseline.pt").unlink()
    return {"steps": every, "wall_s": wall_s, "write_s": [save_s]}


MODES = {"none": time_none, "background": time_background, "torch.save": time_torch_save}


def bench_size(name: str, plan: Plan, replay_steps: int, report: SnapshotReport, say: Say) -> None:
    """All modes of one model, and a replay where steps are given; every one is a record."""
    device = torch.device(plan.device)
    length = POSITIONS // QUICK_SHRINK if plan.quick else POSITIONS
    config = opt_config(name, quick=plan.quick)
    work = Workload(ZO.name, plan.batch * length)
    where = {"placement": "stream", "dtype": torch.bfloat16, "device": device}
    model = keyhole.load(config, init="random", workload=work, **where)
    weights_bytes = sum(home.numel() * home.element_size() for home in model.engine.homes)
    none: dict[str, Any] = {}

    def add(record: dict[str, Any]) -> None:
        report.add({"kind": "mode", "model": name, **record})
        say(one_line(report.records[-1], none or report.records[-1]))

    if plan.scratch is not None:
        plan.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=plan.scratch, prefix="keyhole-bench-") as scratch:
        generator = torch.Generator().manual_seed(1)
        ids_BT = torch.randint(4, config.vocab_size, (plan.batch, length), generator=generator)
        loop = Loop(model, {"input_ids": ids_BT, "labels": ids_BT}, Path(scratch))
        loop.run(3)
        loop.wait()
        rate = disk_rate(Path(scratch), weights_bytes)
        for mode in MODES:
            measure.clean_up(device)
            found = {"mode": mode, "batch": plan.batch, "length": length}
            found |= {"weights_bytes": weights_bytes, "disk_bytes_per_s": rate}
            found |= MODES[mode](loop, plan.every, plan.periods)
            found["tokens_per_s"] = found["steps"] * ids_BT.numel() / found["wall_s"]
            found["host_bytes"] = measure.host_memory()
            none = none or found
            add(found)
        if replay_steps:
            add({"mode": "replay", "steps": replay_steps, "wall_s": time_replay(loop, replay_steps)})
        loop.journal.close()
    model.close()
    del loop, model
    gc.collect()


def time_replay(loop: Loop, steps: int) -> float:
    """Seconds in which a journal of `steps` steps is applied to the model where it lies."""
    rng = random.Random(0)
    first = loop.step_count
    records = [
        journal.Record(first + i, 0, 0, 0, 0.0, loop.model.device.type, (LR, rng.gauss(0.0, 1.0)))
        for i in range(1, steps + 1)
    ]
    loop.method.flush()
    return apply_records(loop.method, records, print)


def bench_snapshots(
    sizes: list[str],
    *,
    out: Path,
    command: str,
    scratch: Path | None = None,
    batch: int = 16,
    every: int = 10,
    periods: int = 2,
    replay_steps: int = 1000,
    device: str | None = None,
    quick: bool = False,
    say: Say = print,
) -> SnapshotReport:
    """Runs all sizes; returns the report, which is on disk already. The first size is replayed."""
    plan = Plan(batch, every, periods, make_job(device, quick, 0, 0, None).device, quick, scratch)
    report = SnapshotReport(out, command, quick, __doc__)
    report.add({"kind": "machine", "device": plan.device, **environment()})
    for i, name in enumerate(sizes):
        bench_size(name, plan, replay_steps if i == 0 else 0, report, say)
    return report
