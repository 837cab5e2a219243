"""Runs cases in worker processes: both ends of the pipe.

A case is a frozen dataclass with a `name` and a `group`; what is measured of it is a function (case, job, emit) ->
numbers, which is given as "module:name". A worker (`python -m keyhole.bench.process`) runs the cases of one group: the
host peak is that of few models, and a crash costs one case. It reads its job from stdin and writes records, each as a
line of JSON after PREFIX:

    {"kind": "machine", ...}                    once: GPU, driver, versions
    {"kind": "case", "name", "status", ...}     after each case: ok | error | skipped
    anything else that the function emits, such as rates of the link

A failed case is a record with the error. After an error of the CUDA context nothing works any more, so the worker ends,
and another one takes the rest. A worker that does not stop by itself is
killed GRACE_S seconds after the limit. A quick run stays in one process, since starting another would take longer than
the work.
"""

import json
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import groupby
from typing import Any, Protocol

from keyhole.bench.report import Record, Report
from keyhole.errors import UserError

PREFIX = "@record "
GRACE_S = 30.0
NO_LIMIT_S = 10 * 365 * 86400.0

Say = Callable[[str], None]
Emit = Callable[[Record], None]


@dataclass(frozen=True)
class Job:
    """How every case is run."""

    device: str  # cuda or cpu
    quick: bool  # tiny shapes
    warm_up: int  # steps
    timed: int  # steps
    deadline_s: float  # time.time() after which no case begins


class Case(Protocol):
    """A frozen dataclass."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> object: ...


def make_job(device: str | None, quick: bool, warm_up: int, timed: int, time_limit_s: float | None) -> Job:
    """device: None is a GPU, or for a quick run also the CPU."""
    import torch

    if device not in (None, "cpu", "cuda"):
        raise UserError(f"--device: {device!r} is not one of cpu, cuda")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: cuda was asked for, but PyTorch sees no CUDA GPU here; use --quick")
    if device == "cpu" and not quick:
        raise UserError(
            "bench: full shapes would take days on a CPU; use a GPU (--device cuda), or --quick for tiny ones"
        )
    return Job(device, quick, warm_up, timed, time.time() + (NO_LIMIT_S if time_limit_s is None else time_limit_s))


def run(measure: str, cases: Sequence[Case], job: Job, report: Report, say: Say) -> None:
    """Runs all cases, group by group, until every one has a record in the report; says a line about each."""

    def receive(found: Record) -> None:
        report.add(found)
        if line := report.line(found):
            say(line)

    if job.quick:
        return run_here(measure, cases, job, receive)
    for _, members in groupby(cases, key=lambda case: case.group):
        run_apart(measure, list(members), job, receive, say)


# -- in the worker -----------------------------------------------------------------------------------------------------


def run_here(measure: str, cases: Sequence[Case], job: Job, emit: Emit) -> None:
    """Runs cases one after the other in this process."""
    import torch

    from keyhole.bench.measure import clear_device, device_of
    from keyhole.machine.probe import environment

    warnings.filterwarnings("ignore", message="mkldnn_matmul")
    if job.device == "cuda":
        torch.cuda.init()
    found = {"kind": "machine", "device": job.device, "tf32": torch.backends.cuda.matmul.allow_tf32}
    emit(found | environment())
    for case in cases:
        if time.time() > job.deadline_s:
            emit(record(case, "skipped", error="the time limit has passed"))
            continue
        found = _attempt(_named(measure), case, job, emit)
        emit(found)
        if "CUDA error" in found.get("error", ""):
            sys.exit("the CUDA context is lost")
        clear_device(device_of(job.device))  # here, where no traceback references tensors any more


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _attempt(measure: Callable[[Case, Job, Emit], Record], case: Case, job: Job, emit: Emit) -> Record:
    try:
        return record(case, "ok", **measure(case, job, emit))
    except Exception as error:
        return record(case, "error", error=f"{type(error).__name__}: {error}"[:2000])


def record(case: Any, status: str, **found: Any) -> Record:
    return {"kind": "case", "name": case.name, "case": asdict(case), "status": status, **found}


def serve() -> None:
    """The main program of a worker."""
    told = json.loads(sys.stdin.read())
    kind = _named(told["kind"])

    def emit(found: Record) -> None:
        print("\n" + PREFIX + json.dumps(found), flush=True)

    run_here(told["measure"], [kind(**case) for case in told["cases"]], Job(**told["job"]), emit)


# -- in the parent process ---------------------------------------------------------------------------------------------


def run_apart(measure: str, cases: Sequence[Case], job: Job, receive: Emit, say: Say) -> None:
    """Runs cases in workers, one after the other, until every case has a record."""
    left, kind = {case.name: case for case in cases}, type(cases[0])
    told = {"measure": measure, "kind": f"{kind.__module__}:{kind.__name__}", "job": asdict(job)}
    while left:
        output: list[str] = []
        is_late = time.time() > job.deadline_s
        rest: list[Record] = [asdict(case) for case in left.values()]  # type: ignore[call-overload]
        for found in [] if is_late else _records(told | {"cases": rest}, job, output, say):
            if found["kind"] == "case":
                left.pop(found["name"])
            receive(found)
        for name in list(left)[: None if is_late else 1]:  # a worker that ends too early ended in the first of them
            if is_late:
                receive(record(left.pop(name), "skipped", error="the time limit has passed"))
            else:
                died = f"the worker ended with exit code {output[-1]}: {' '.join(output[-8:-1])}"[:2000]
                receive(record(left.pop(name), "error", error=died))


def _records(told: Record, job: Job, output: list[str], say: Say) -> Iterator[Record]:
    """Yields a worker's records as they arrive; afterwards `output` ends with its exit code."""
    command = [sys.executable, "-m", "keyhole.bench.process"]
    worker = subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    killer = threading.Timer(max(1.0, job.deadline_s + GRACE_S - time.time()), worker.kill)
    killer.daemon = True
    killer.start()
    assert worker.stdin is not None and worker.stdout is not None
    try:
        with suppress(BrokenPipeError):  # it may have died at once
            worker.stdin.write(json.dumps(told))
            worker.stdin.close()
        for text in worker.stdout:
            if text.startswith(PREFIX):
                yield json.loads(text.removeprefix(PREFIX))
            elif text.strip():
                output.append(text.strip())
                say(f"  {text.rstrip()}")
        output.append(str(worker.wait()))
    finally:
        killer.cancel()
        worker.kill()


if __name__ == "__main__":
    serve()
