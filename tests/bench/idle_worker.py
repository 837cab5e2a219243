"""Measurements that compute nothing: what is left is the process and its pipe."""

import os
import sys

from keyhole.bench.cases import Case
from keyhole.bench.process import Emit, Job
from keyhole.bench.report import Record


def measure_nothing(case: Case, job: Job, emit: Emit) -> Record:
    """Which system it was asked for."""
    return {"measured": case.system}


def die(case: Case, job: Job, emit: Emit) -> Record:
    """As a process that is killed."""
    os._exit(7) if case.system == "resident" else sys.exit(8)


def lose_the_context(case: Case, job: Job, emit: Emit) -> Record:
    """As every later operation of the process would."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
