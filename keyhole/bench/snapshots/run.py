"""What a checkpoint every few steps costs a zeroth-order run, and how fast a journal is replayed: Table 6 of the
ZO-Offloading paper.

    none                  streamed steps without checkpoints; all streamed modes keep the journal
    background            a background checkpoint every `every` steps (checkpoint/writer.py)
    torch.save            training stops, and torch.save writes the weights
    textbook              MeZO's loop in GPU memory (bench/zo/textbook.py), without checkpoints
    textbook torch.save   the same, stopped for torch.save, which also copies the weights from the GPU

A period is `every` steps. A mode is timed from the start of its first checkpoint to the point where the one after the
last period could start, including any wait for the disk: this is the pace of a long run. keyhole's checkpoints have
checksums and are flushed to the disk; torch.save's have no checksums and are not flushed. If the disk cannot write one
checkpoint in the time of one period, it bounds the run in every mode, so choose the batch accordingly

    seconds per step x every >= bytes of the weights / bytes per second of the disk         (1.3 GB/s: batch 16)

The floor of a mode with checkpoints is the longer of a period without checkpoints, and the weights at the disk's own
rate, which is measured in the same run (disk.py). Host memory is the peak resident set, beside that of `none`, without
the kernel's page cache.
"""

import gc
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.measure import random_batch
from keyhole.bench.process import Say, device_of, make_job
from keyhole.bench.shapes import POSITIONS, QUICK_SHRINK, opt_config
from keyhole.bench.snapshots.disk import disk_rate
from keyhole.bench.snapshots.loops import LR, Loop, TextbookLoop
from keyhole.bench.snapshots.report import TEXTBOOK, SnapshotReport, one_line
from keyhole.checkpoint import journal, select
from keyhole.checkpoint.replay import apply_records
from keyhole.checkpoint.state import State, verify
from keyhole.checkpoint.writer import Writer
from keyhole.machine.probe import environment
from keyhole.methods.workload import Workload
from keyhole.methods.zo.traits import ZO


@dataclass(frozen=True)
class Plan:
    """The settings for every model."""

    batch: int
    every: int  # steps between checkpoints
    periods: int  # checkpoints that are timed
    device: str
    quick: bool
    scratch: Path | None  # directory for the checkpoints


def time_none(loop: Loop | TextbookLoop, every: int, periods: int) -> dict[str, Any]:
    loop.wait()
    begin_s = time.perf_counter()
    loop.run(every)
    loop.wait()
    return {"steps": every, "wall_s": time.perf_counter() - begin_s}


def time_background(loop: Loop, every: int, periods: int) -> dict[str, Any]:
    """One checkpoint per period; each is verified afterwards, or deleted when the next one is complete."""
    background = Writer(loop.model, loop.method)
    done = []
    loop.wait()
    begin_s = time.perf_counter()
    for _ in range(periods):
        step = loop.step_count
        background.begin(loop.scratch / f"checkpoint-{step}", State(step), before_rename=partial(loop.settle, step))
        loop.run(every)
        written = background.wait()
        assert written is not None
        done.append(written)
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


def time_torch_save(loop: Loop | TextbookLoop, every: int, periods: int) -> dict[str, Any]:
    """The baseline, the only place where keyhole writes a pickle."""
    loop.wait()
    begin_s = time.perf_counter()
    torch.save(loop.tensors(), loop.scratch / "baseline.pt")
    save_s = time.perf_counter() - begin_s
    loop.run(every)
    loop.wait()
    wall_s = time.perf_counter() - begin_s
    (loop.scratch / "baseline.pt").unlink()
    return {"steps": every, "wall_s": wall_s, "write_s": [save_s]}


STREAMED = {"none": time_none, "background": time_background, "torch.save": time_torch_save}
IN_MEMORY = {TEXTBOOK: time_none, f"{TEXTBOOK} torch.save": time_torch_save}
MODES = STREAMED | IN_MEMORY


def bench_size(name: str, plan: Plan, replay_steps: int, report: SnapshotReport, say: Say) -> None:
    """Times all modes of one model, and a replay if steps are given; each is a record."""
    if plan.scratch is not None:
        plan.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=plan.scratch, prefix="keyhole-bench-") as scratch:
        for placement, modes in (("stream", STREAMED), ("resident", IN_MEMORY)):
            Size(name, plan, Path(scratch), report, say).time(placement, modes, replay_steps)
            gc.collect()


class Size:
    """One model, its plan, and its report."""

    def __init__(self, name: str, plan: Plan, scratch: Path, report: SnapshotReport, say: Say) -> None:
        self.name, self.plan, self.scratch, self.report, self.say = name, plan, scratch, report, say
        self.device = device_of(plan.device)
        self.length = POSITIONS // QUICK_SHRINK if plan.quick else POSITIONS

    def time(self, placement: str, modes: dict[str, Any], replay_steps: int) -> None:
        """Loads the model, times the modes and frees it."""
        config = opt_config(self.name, quick=self.plan.quick)
        work = Workload(ZO.name, self.plan.batch * self.length)
        where = {"placement": placement, "dtype": torch.bfloat16, "device": self.device}
        model = keyhole.load(config, init="random", workload=work, **where)
        batch = random_batch(self.plan.batch, self.length, config.vocab_size)
        weights_bytes = sum(home.numel() * home.element_size() for home in model.engine.homes)
        loop = (Loop if placement == "stream" else TextbookLoop)(model, batch, self.scratch)
        loop.run(3)
        loop.wait()
        rate = disk_rate(self.scratch, weights_bytes)
        for mode, timed in modes.items():
            measure.clean_up(self.device)
            found: dict[str, Any] = {"mode": mode, "batch": self.plan.batch, "length": self.length}
            found |= {"weights_bytes": weights_bytes, "disk_bytes_per_s": rate}
            found |= timed(loop, self.plan.every, self.plan.periods)
            found["tokens_per_s"] = found["steps"] * batch["input_ids"].numel() / found["wall_s"]
            found |= {"host_bytes": measure.host_memory(), "device": measure.device_memory(self.device)}
            self.add(found)
        if isinstance(loop, Loop):
            if replay_steps:
                self.add({"mode": "replay", "steps": replay_steps, "wall_s": time_replay(loop, replay_steps)})
            loop.journal.close()
        model.close()

    def add(self, record: dict[str, Any]) -> None:
        """Adds a record to the report and prints it."""
        self.report.add({"kind": "mode", "model": self.name, **record})
        self.say(one_line(self.report.records[-1], self.report.records))


def time_replay(loop: Loop, steps: int) -> float:
    """Seconds to apply a journal of `steps` steps to the model in place."""
    rng = random.Random(0)
    first = loop.step_count
    records = [
        journal.Record(first + i, 0, 0, 0, 0.0, loop.model.device.type, (LR, rng.gauss(0.0, 1.0)))
        for i in range(1, steps + 1)
    ]
    loop.method.flush()
    return apply_records(loop.method, records)


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
    """Runs all sizes; returns the report, which has been written to disk. The first size is replayed."""
    plan = Plan(batch, every, periods, make_job(device, quick, 0, 0, None).device, quick, scratch)
    report = SnapshotReport(out, command, quick, __doc__)
    report.add({"kind": "machine", "device": plan.device, **environment()})
    for i, name in enumerate(sizes):
        bench_size(name, plan, replay_steps if i == 0 else 0, report, say)
    return report
