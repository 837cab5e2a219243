"""Runs the cases of one group, in a process of its own, and says what it found, a JSON record a line.

    {"kind": "machine", ...}                    once: GPU, driver, versions
    {"kind": "link", "unit_bytes", "up", ...}   once a size of unit
    {"kind": "begin", "name"}                   before each case: if the process dies, it died here
    {"kind": "case", "name", "status", ...}     after each case: ok | error | skipped

A case that fails is a record with the error. After an error of the CUDA context nothing would work any
more, so the process ends with exit code 3 and the runner starts another for the cases that are left.
"""

import json
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.cases import Case
from keyhole.bench.kept_model import DTYPES, Emit, KeptModel, streamed_homes
from keyhole.bench.shapes import QUICK_SHRINK
from keyhole.bench.textbook import Textbook
from keyhole.bench.trace import trace_step
from keyhole.machine.probe import environment
from keyhole.methods.base import Room, Workload
from keyhole.methods.zo.memory import device_bytes
from keyhole.model.weights.format import Wire
from keyhole.plan.placement import workspace_bytes

PREFIX = "@record "
BROKEN_CONTEXT = 3
LR, EPS = 1e-7, 1e-3


class BrokenContext(RuntimeError):
    """The CUDA context is lost; this process can do nothing more."""


class Worker:
    """Measures case after case, with models that are kept where they can be."""

    def __init__(self, emit: Emit, device: str, *, quick: bool, warm_up: int, timed: int) -> None:
        self.emit, self.device = emit, torch.device("cuda", 0) if device == "cuda" else torch.device(device)
        self.quick, self.warm_up, self.timed = quick, warm_up, timed
        self.kept = KeptModel(emit, self.device, quick)

    def run(self, cases: list[Case], deadline_s: float, timeline: str | None = None) -> None:
        """Runs cases until the deadline (time.time()); a case that would not fit is skipped."""
        for case in cases:
            if time.time() + self.estimate_s(case) > deadline_s:
                self.emit(record(case, "skipped", error="the time limit would be passed"))
                continue
            self.emit({"kind": "begin", "name": case.name})
            error = self.attempt(case)
            if "CUDA error" in error:
                raise BrokenContext(error)
            if error:
                self.kept.close()  # here, where no traceback holds on to tensors any more
            elif timeline and case.system == "streamed":
                timeline = self.try_trace(case, timeline)
        self.kept.close()

    def attempt(self, case: Case) -> str:
        """Emits the record of a case; returns what went wrong, or ""."""
        try:
            self.emit(record(case, "ok", **self.measure(case)))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:2000]
            self.emit(record(case, "error", error=message))
            return message
        return ""

    def estimate_s(self, case: Case) -> float:
        """A rough upper guess: making the weights, then arithmetic, passes over memory and the link."""
        if self.quick:
            return 0.0
        size, host = case.weight_bytes, case.system == "streamed"
        load_s = 0.0 if case.load == self.kept.key else 2 + size / (2e9 if host else 1e11)
        flops_s = 40e12 if case.dtype == "fp32" else 400e12
        params = size / (4 if case.dtype == "fp32" else 2)
        step_s = 4 * params * case.tokens / flops_s + 20 * size / 3e12 + (size / 20e9 if host else 0)
        return load_s + (self.warm_up + self.timed) * step_s

    def measure(self, case: Case) -> dict[str, Any]:
        model = self.kept.ready(case)
        measure.clean_up(self.device)  # what drawing the weights took must not be found again by the method
        batch = self.batch(case)
        if case.system == "textbook":
            method: Any = Textbook(model.module, LR, eps=EPS)
        else:
            method = self.method(model, case)
        measure.clean_up(self.device)
        engine, moved = model.engine, {}

        def mark_bytes() -> None:
            moved.update(up=engine.bytes_up, down=engine.bytes_down)

        step, device = lambda: method.step(batch), self.device
        found = measure.time_steps(step, device, self.warm_up, self.timed, mark_bytes)
        found |= self.facts(model, case)
        found |= {"load_s": self.kept.load_s, "link": self.kept.link}
        found["bytes_up"] = (engine.bytes_up - moved["up"]) // self.timed
        found["bytes_down"] = (engine.bytes_down - moved["down"]) // self.timed
        return found

    def method(self, model: keyhole.Model, case: Case) -> keyhole.ZO:
        compiled: bool | str = "aot_eager" if case.compiled and self.quick else case.compiled
        every = None if case.rare_write_backs else 1
        how = {"deferred_update": case.deferred_update, "write_back_every": every}
        return keyhole.ZO(model, LR, eps=EPS, compile=compiled, **how)

    def try_trace(self, case: Case, path: str) -> None:
        """Saves the timeline of one more step; a failure is said and costs nothing else."""
        try:
            self.trace(case, path)
        except Exception as error:
            print(f"timeline: {type(error).__name__}: {error}", file=sys.stderr)

    def trace(self, case: Case, path: str) -> None:
        method = self.method(self.kept.model, case)
        batch = self.batch(case)
        trace_step(self.kept.model.engine, lambda: method.step(batch), Path(path))

    def facts(self, model: keyhole.Model, case: Case) -> dict[str, Any]:
        """Bytes, and what was decided."""
        size = torch.empty(0, dtype=DTYPES[case.dtype]).element_size()
        zo = case.system != "textbook"
        return {
            "parameters": sum(t.shape.numel() for t in model.layout.tensors),
            "blocks_run": model.layout.block_count,
            "weights_bytes": model.layout.numel * size,
            "streamed_bytes": sum(h.numel() * h.element_size() for h in streamed_homes(model)),
            "planned_bytes": self.planned_bytes(model, case) if zo else None,
            "pinned": model.pinned,
            "device": measure.device_memory(self.device),
            "host_bytes": max(self.kept.host_bytes, measure.host_memory()),
            "decided": model.describe(),
        }

    def planned_bytes(self, model: keyhole.Model, case: Case) -> int:
        """The planned device peak for this case's tokens (a load may serve several batch sizes)."""
        room = Room(Wire(model.dtype, case.wire), workspace_bytes(self.device))
        return device_bytes(model.layout, model.engine.streamed, Workload(tokens=case.tokens), room).total

    def batch(self, case: Case) -> dict[str, torch.Tensor]:
        length = case.length // QUICK_SHRINK if self.quick else case.length
        vocabulary = self.kept.model.config.vocab_size
        ids_BT = torch.randint(
            4, vocabulary, (case.batch, length), generator=torch.Generator().manual_seed(1)
        )
        return {"input_ids": ids_BT, "labels": ids_BT}


def record(case: Case, status: str, **found: Any) -> dict[str, Any]:
    return {"kind": "case", "name": case.name, "case": asdict(case), "status": status, **found}


def machine(device: str) -> dict[str, Any]:
    return {
        "kind": "machine",
        "device": device,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        **environment(),
    }


def run_group(emit: Emit, job: dict[str, Any]) -> None:
    """A job: device, quick, warm_up, timed, deadline_s, timeline, and the cases of one group."""
    warnings.filterwarnings("ignore", message="mkldnn_matmul")
    worker = Worker(emit, job["device"], quick=job["quick"], warm_up=job["warm_up"], timed=job["timed"])
    if job["device"] == "cuda":
        torch.cuda.init()
    emit(machine(job["device"]))
    worker.run([Case(**case) for case in job["cases"]], job["deadline_s"], job["timeline"])


def main() -> int:
    """Reads a job from stdin; writes records to stdout."""

    def emit(found: dict[str, Any]) -> None:
        print("\n" + PREFIX + json.dumps(found), flush=True)

    try:
        run_group(emit, json.loads(sys.stdin.read()))
    except BrokenContext:
        return BROKEN_CONTEXT
    return 0


if __name__ == "__main__":
    sys.exit(main())
