"""`keyhole bench snapshots`: what a checkpoint every few steps costs a zeroth-order run, and how fast a journal is
replayed: Table 6 of the ZO-Offloading paper.

    none                  streamed steps without checkpoints
    background            a background checkpoint every EVERY steps (checkpoint/writer.py)
    torch.save            training stops, and torch.save writes the weights
    textbook              MeZO's loop in GPU memory (baselines.py), without checkpoints
    textbook torch.save   the same, stopped for torch.save, which also copies the weights from the GPU
    replay                a journal of so many steps is applied to the model

A period is EVERY steps. A mode is timed from the start of its first checkpoint to the point where the one after the
last period could start, including any wait for the disk: this is the pace of a long run. keyhole's checkpoints have
checksums and are flushed to the disk; torch.save's have no checksums and are not flushed. If the disk cannot write one
checkpoint in the time of one period, it bounds the run in every mode, so choose the batch accordingly:

    seconds per step x every >= bytes of the weights / bytes per second of the disk         (1.3 GB/s: batch 16)

"half GiB" is half of the weights, the limit for copies. Checkpoints go to the system's place for temporary files:
TMPDIR names another disk.
"""

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.cases import TEXTBOOK, Case
from keyhole.bench.process import Emit, Job
from keyhole.bench.report import Cells, Record, Report, number, table
from keyhole.bench.steps import batches_of, load, method_of
from keyhole.checkpoint import journal, select
from keyhole.checkpoint.replay import apply_records
from keyhole.checkpoint.state import State, verify
from keyhole.checkpoint.writer import Writer
from keyhole.machine.sizes import GIB
from keyhole.plan.measure import wait

LR = 1e-7
NONE, BACKGROUND, REPLAY = "none", "background", "replay"
EVERY, PERIODS, REPLAYED = 10, 2, 1000  # steps between checkpoints, checkpoints that are timed, steps of the journal


def measure_saving(case: Case, job: Job, emit: Emit) -> Record:
    device, is_textbook = measure.device_of(job.device), case.system == TEXTBOOK
    model = load(case, job.device, job.quick)
    weights_bytes = sum(home.nbytes for home in model.engine.homes)
    batches, method = batches_of(case, job.quick, model.config.vocab_size), method_of(case, model)

    def run(count: int) -> None:
        for _ in range(count):
            method.step(batches)

    with tempfile.TemporaryDirectory(prefix="keyhole-bench-") as place:
        scratch = Path(place)
        run(3)
        wait(device)
        measure.clean_up(device)
        if isinstance(method, keyhole.ZO) and case.saving == REPLAY:
            found = time_replay(method, REPLAYED)
        elif isinstance(method, keyhole.ZO) and case.saving == BACKGROUND:
            found = time_background(method, run, scratch)
        else:
            begin_s, written = time.perf_counter(), list[float]()
            if case.saving:  # the only place where keyhole writes a pickle
                if not is_textbook:
                    model.apply_deferred()
                tensors = dict(model.module.state_dict() if is_textbook else model.named_tensors())
                torch.save(tensors, scratch / "baseline.pt")
                written.append(time.perf_counter() - begin_s)
            run(EVERY)
            wait(device)
            found = {"steps": EVERY, "wall_s": time.perf_counter() - begin_s, "write_s": written}
    found["weights_bytes"] = weights_bytes
    found["tokens_per_s"] = found["steps"] * batches[0]["input_ids"].numel() / found["wall_s"]
    found |= {"host_bytes": measure.host_memory(), "device": measure.device_memory(device)}
    model.close()
    return found


def time_background(method: keyhole.ZO, run: Callable[[int], None], scratch: Path) -> Record:
    """One checkpoint per period; each is verified afterwards, or deleted when the next one is complete."""
    background, done, step = Writer(method.model, method), [], 0
    begin_s = time.perf_counter()
    for _ in range(PERIODS):
        old = partial(select.prune, scratch, 1, step)
        background.begin(scratch / f"checkpoint-{step}", State(step), delete_old=old)
        run(EVERY)
        written = background.wait()
        assert written is not None
        done.append(written)
        if written.error is not None:
            raise written.error
        step += EVERY
    wait(method.model.device)
    wall_s = time.perf_counter() - begin_s
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
    rng, kind = random.Random(0), method.model.device.type
    numbers = [(i, (LR, rng.gauss(0.0, 1.0))) for i in range(method.step_count + 1, method.step_count + steps + 1)]
    method.flush()
    records = [journal.Record(step, 0, 0, 0, 0.0, kind, coef) for step, coef in numbers]
    return {"steps": steps, "wall_s": apply_records(method, records)}


def by_mode(records: list[Record]) -> dict[tuple[str, str], Record]:
    found = {}
    for r in (r for r in records if r.get("status") == "ok"):
        words = [TEXTBOOK if r["case"]["system"] == TEXTBOOK else "", r["case"]["saving"]]
        found[r["case"]["model"], " ".join(filter(None, words)) or NONE] = r
    return found


class SnapshotReport(Report):
    """A line per mode, beside the same steps without checkpoints and beside MeZO's."""

    def cells(self, model: str, mode: str) -> Cells:
        found = by_mode(self.records)
        r, textbook = found[model, mode], found.get((model, TEXTBOOK))
        none = found.get((model, TEXTBOOK if mode.startswith(TEXTBOOK) else NONE), r)
        period_s = r["wall_s"] / r["steps"] * none["steps"]  # none is timed over one period
        cells = {"model": model, "batch": str(r["case"]["batch"]), "mode": mode, "tok/s": f"{r['tokens_per_s']:,.0f}"}
        cells["against none"] = f"{r['tokens_per_s'] / none['tokens_per_s']:.3f}x"
        cells["against textbook"] = f"{r['tokens_per_s'] / textbook['tokens_per_s']:.3f}x" if textbook else ""
        for head, key in {"written in s": "write_s", "training waited s": "training_waited_s"}.items():
            cells[head] = ", ".join(f"{seconds:.2f}" for seconds in r.get(key, []))
        cells |= {"period s": f"{period_s:.2f}", "none s": f"{none['wall_s']:.2f}"}
        if "copies_bytes" in r:
            cells |= {"copies GiB": f"{r['copies_bytes'] / GIB:.2f}", "half GiB": f"{r['weights_bytes'] / 2 / GIB:.2f}"}
        return cells | {"GPU GiB": number(r["device"]["reserved_bytes"] / GIB or None)}

    def sections(self) -> list[str]:
        found = by_mode(self.records)
        told = [f"{r['name']}: {r['steps']} steps in {r['wall_s']:.2f} s" for (_, m), r in found.items() if m == REPLAY]
        rows = [self.cells(*place) for place in found if place[1] != REPLAY]
        return [(__doc__ or "").strip().split("\n\n", 1)[1], table(rows), *told]

    def line(self, found: Record) -> str:
        if found.get("status") != "ok":
            return super().line(found)
        written = f"; written in {statistics.mean(found['write_s']):.2f} s" if found.get("write_s") else ""
        return f"{found['name']:<26} {found['tokens_per_s']:10,.0f} tok/s, {found['wall_s']:.2f} s{written}"
