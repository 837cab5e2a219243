"""A measurement (keyhole/bench/process.py) that computes nothing: what is left is the process and its pipes."""

from keyhole.bench.cases import Case
from keyhole.bench.process import Emit, Job
from keyhole.bench.report import Record


def measure_nothing(case: Case, job: Job, emit: Emit) -> Record:
    """Which system it was asked for."""
    return {"measured": case.system}
