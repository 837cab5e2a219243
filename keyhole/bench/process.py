"""Runs cases in worker processes: both ends of the pipe.

A worker is a separate process: all memory is freed between models, the host peak is that of one model, and a crash
costs one case. It reads a job from stdin and writes records, each as a line of JSON after PREFIX:

    {"kind": "machine", ...}                    once: GPU, driver, versions
    {"kind": "begin", "name"}                   before each case: if the process dies, it died here
    {"kind": "case", "name", "status", ...}     after each case: ok | error | skipped
    {"kind": "link", "unit_bytes", "up", ...}   when the link was measured

A failed case is a record with the error. After an error of the CUDA context nothing works any more, so the worker ends,
its current case is recorded as failed, and another worker takes the rest. A worker that does not stop by itself is
killed GRACE_S seconds after the limit.
"""

import json
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from keyhole.bench.report import Record
from keyhole.errors import UserError

PREFIX = "@record "
BROKEN_CONTEXT = 3  # exit code
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
    """A frozen dataclass with a name."""

    @property
    def name(self) -> str: ...


class Worker(Protocol):
    """The interface of a benchmark: how it runs a case."""

    def machine(self) -> dict[str, Any]:
        """Facts that are measured once per process."""

    def estimate_s(self, case: Any) -> float:
        """A rough upper estimate of the seconds of a case."""

    def measure(self, case: Any) -> dict[str, Any]: ...

    def clear(self) -> None:
        """Frees memory that cases have left on the device."""


Make = Callable[[Emit, Job], Worker]


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


def device_of(name: str) -> Any:
    """The device of a job; the first GPU by its index, which some of torch's functions require."""
    import torch

    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


# -- in the worker -----------------------------------------------------------------------------------------------------


class BrokenContext(RuntimeError):
    """The CUDA context is lost; this process cannot continue."""


def run_cases(make: Make, emit: Emit, job: Job, cases: list[Any]) -> None:
    """Runs cases one after the other in this process."""
    import torch

    from keyhole.machine.probe import environment

    warnings.filterwarnings("ignore", message="mkldnn_matmul")
    if job.device == "cuda":
        torch.cuda.init()
    worker = make(emit, job)
    found = {"kind": "machine", "device": job.device, "tf32": torch.backends.cuda.matmul.allow_tf32}
    emit(found | environment() | worker.machine())
    for case in cases:
        if time.time() + worker.estimate_s(case) > job.deadline_s:
            emit(record(case, "skipped", error="the time limit would be passed"))
            continue
        emit({"kind": "begin", "name": case.name})
        error = _attempt(worker, emit, case)
        if "CUDA error" in error:
            raise BrokenContext(error)
        if error:
            worker.clear()  # here, where no traceback references tensors any more
    worker.clear()


def _attempt(worker: Worker, emit: Emit, case: Any) -> str:
    """Emits the record of a case; returns the error, or ""."""
    try:
        emit(record(case, "ok", **worker.measure(case)))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"[:2000]
        emit(record(case, "error", error=message))
        return message
    return ""


def record(case: Any, status: str, **found: Any) -> Record:
    return {"kind": "case", "name": case.name, "case": asdict(case), "status": status, **found}


def serve(make: Make, kind: type) -> int:
    """The main program of a worker: cases of this class come in on stdin, records go out. Returns the exit code."""
    told = json.loads(sys.stdin.read())

    def emit(found: Record) -> None:
        print("\n" + PREFIX + json.dumps(found), flush=True)

    try:
        run_cases(make, emit, Job(**told["job"]), [kind(**case) for case in told["cases"]])
    except BrokenContext:
        return BROKEN_CONTEXT
    return 0


# -- in the parent process ---------------------------------------------------------------------------------------------


def run_group(make: Make, module: str, receive: Emit, job: Job, cases: list[Any], say: Say) -> None:
    """Runs cases in a worker; a quick run stays in this process, since starting another would take longer than the
    work."""
    if job.quick:
        run_cases(make, receive, job, cases)
    else:
        run_apart(module, receive, job, cases, say)


def run_apart(module: str, receive: Emit, job: Job, cases: list[Any], say: Say) -> None:
    """Runs cases in workers (`python -m module`), one after the other, until every case has a record."""
    left = {case.name: case for case in cases}

    def give_up(names: list[str], status: str, error: str) -> None:
        for name in names:
            receive(record(left.pop(name), status, error=error))

    while left:
        if time.time() > job.deadline_s:
            return give_up(list(left), "skipped", "the time limit has passed")
        output: list[str] = []
        at, count = None, len(left)
        for found in _records(module, job, list(left.values()), output, say):
            if found["kind"] == "begin":
                at = found["name"]
            if found["kind"] == "case":
                left.pop(found["name"])
                at = None
            receive(found)
        died = f"the worker ended with exit code {output[-1]}: {' '.join(output[-8:-1])}"[:2000]
        if at is not None:
            give_up([at], "error", died)
        elif len(left) == count:
            give_up(list(left), "error", died)


def _records(module: str, job: Job, cases: list[Any], output: list[str], say: Say) -> Iterator[Record]:
    """Yields a worker's records as they arrive; afterwards `output` ends with its exit code."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    worker = subprocess.Popen([sys.executable, "-m", module], text=True, **pipes)
    killer = threading.Timer(max(1.0, job.deadline_s + GRACE_S - time.time()), worker.kill)
    killer.daemon = True
    killer.start()
    assert worker.stdin is not None and worker.stdout is not None
    try:
        with suppress(BrokenPipeError):  # it may have died at once
            worker.stdin.write(json.dumps({"job": asdict(job), "cases": [asdict(case) for case in cases]}))
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
