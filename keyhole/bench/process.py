"""Runs cases in worker processes.

A case is a frozen dataclass with a `name` and a `group`; what is measured of it is a function (case, job, emit) ->
numbers. A worker runs the cases of one group: the host peak is that of few models, and a crash costs one case. It sends
records:

    {"kind": "machine", ...}                    once: GPU, driver, versions
    {"kind": "case", "name", "status", ...}     after each case: ok | error | skipped
    anything else that the function emits, such as rates of the link

A failed case is a record with the error. After an error of the CUDA context nothing works any more, so the worker ends,
and another one takes the rest. A worker that does not stop by itself is killed GRACE_S seconds after the limit. A quick
run stays in one process, since starting another would take longer than the work.
"""

import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

import torch

from keyhole.bench.cases import Case
from keyhole.bench.measure import clear_device, device_of
from keyhole.bench.report import Record, Report
from keyhole.errors import UserError
from keyhole.loading import choose_device
from keyhole.machine.gpu import accelerator
from keyhole.machine.probe import environment

GRACE_S = 30.0
NO_LIMIT_S = 14 * 86400.0  # poll takes less than 25 days
CONTEXT_LOST = 3  # exit code of a worker

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


Measure = Callable[[Case, Job, Emit], Record]


def make_job(device: str | None, quick: bool, warm_up: int, timed: int, time_limit_s: float | None) -> Job:
    """device: None is a GPU, or for a quick run also the CPU."""
    device = choose_device(device).type
    if device == "cpu" and not quick:
        raise UserError(
            "bench: full shapes would take days on a CPU; use a GPU (--device cuda), or --quick for tiny ones"
        )
    return Job(device, quick, warm_up, timed, time.time() + (NO_LIMIT_S if time_limit_s is None else time_limit_s))


def run(measure: Measure, cases: Sequence[Case], job: Job, report: Report, say: Say) -> None:
    """Runs all cases, group by group, until every one has a record in the report; says a line about each."""

    def receive(found: Record) -> None:
        report.add(found)
        if line := report.line(found):
            say(line)

    if job.quick:
        return run_here(measure, cases, job, receive)
    for _, members in groupby(cases, key=lambda case: case.group):
        run_apart(measure, list(members), job, receive)


def run_here(measure: Measure, cases: Sequence[Case], job: Job, emit: Emit) -> None:
    warnings.filterwarnings("ignore", message="mkldnn_matmul")
    if job.device == "cuda":
        accelerator.init()
    emit({"kind": "machine", "device": job.device, "tf32": torch.backends.cuda.matmul.allow_tf32, **environment()})
    for case in cases:
        if time.time() > job.deadline_s:
            emit(skipped(case))
            continue
        try:
            found = record(case, "ok") | measure(case, job, emit)
        except Exception as error:
            found = record(case, "error") | {"error": f"{type(error).__name__}: {error}"[:2000]}
        emit(found)
        if "CUDA error" in found.get("error", ""):
            sys.exit(CONTEXT_LOST)
        clear_device(device_of(job.device))  # here, where no traceback references tensors any more


def record(case: Case, status: str) -> Record:
    return {"kind": "case", "name": case.name, "case": asdict(case), "status": status}


def skipped(case: Case) -> Record:
    return record(case, "skipped") | {"error": "the time limit has passed"}


def run_apart(measure: Measure, cases: Sequence[Case], job: Job, receive: Emit) -> None:
    """Runs cases in workers, one after the other, until every case has a record."""
    spawn, left = multiprocessing.get_context("spawn"), list(cases)
    while left:
        if time.time() > job.deadline_s:
            for case in left:
                receive(skipped(case))
            return
        ours, theirs = spawn.Pipe(duplex=False)
        worker = spawn.Process(target=run_here, args=(measure, left, job, theirs.send))
        worker.start()
        theirs.close()
        try:
            while left and ours.poll(min(max(1.0, job.deadline_s + GRACE_S - time.time()), NO_LIMIT_S)):
                found = ours.recv()
                if found["kind"] == "case":
                    left.pop(0)
                receive(found)
        except EOFError:
            worker.join()
        finally:
            worker.kill()
            worker.join()
        if left and worker.exitcode != CONTEXT_LOST:
            receive(record(left.pop(0), "error") | {"error": f"the worker ended with exit code {worker.exitcode}"})
