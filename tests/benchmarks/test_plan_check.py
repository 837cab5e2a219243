"""Planned against measured: the cases cover what they should, and one runs."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.plan_check import CASES, HOST, LAST, MORE, ROUND, Process, in_rounds, run, summary
from keyhole.methods import METHODS
from keyhole.plan.profiles import PROFILES


def test_the_cases_cover_methods_placements_shapes_and_batches() -> None:
    """Twenty of them, all different."""
    assert len({case.name for case in CASES}) == len(CASES) == 20
    assert {case.method for case in CASES} == set(METHODS)
    assert {case.placement for case in CASES} == {"resident", "stream"} and any(case.gpu_memory for case in CASES)
    assert len({case.shape for case in CASES}) == len({case.tokens for case in CASES}) == 2


def test_a_case_has_planned_and_measured_numbers() -> None:
    """On a tiny shape; the summary counts it."""
    case = next(case for case in CASES if case.method == "lomo" and case.placement == "stream")
    found = run(case, torch.device("cpu"), PROFILES["laptop"], quick=True)
    assert min(found["planned"]["seconds"], found["measured"]["seconds"], found["measured"]["host"]) > 0
    assert any(line.startswith("seconds: ") for line in summary([found]))
    assert set(found["host_rates"]) == set(HOST) and min(found["host_rates"].values()) > 0
    assert all(0 < each["cpu_s"] and each["without_core_s"] >= 0 for each in found["used"])


def test_the_first_steps_of_a_round_do_not_count() -> None:
    """A graph that is captured in them, updates that still lag behind."""
    engine, count = SimpleNamespace(device=torch.device("cpu"), bytes_up=0, bytes_down=0, streamed=set()), 0

    def step() -> torch.Tensor:
        nonlocal count
        time.sleep(0.1 if count % ROUND < ROUND - LAST else 0.01)
        count += 1
        return torch.zeros(())

    found = in_rounds(step, engine, 2, None)
    assert count == len(found["steps_s"]) == 2 * ROUND and len(found["bursts"]) == 2
    assert found["seconds"] < 0.09 < 0.1 <= found["steps_s"][0]


@pytest.mark.matrix
def test_updates_of_the_cpu_are_finished_before_their_rate_is_measured() -> None:
    """A burst has it then, and a round more steps."""
    case = next(case for case in CASES if case.method == "adam-offload")
    found = run(case, torch.device("cpu"), PROFILES["laptop"], quick=True)
    assert set(found["host_rates"]) == {*HOST, "adam", "host_memory"} and found["host_rates"]["adam"] > 1e6
    assert len(found["steps_s"]) == ROUND + MORE


def test_the_core_seconds_of_a_process_are_read() -> None:
    """They grow while it works, and are 0 once it has ended."""
    busy = object.__new__(Process)
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    busy.process = subprocess.Popen(
        [sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    busy.process.stdout.readline()
    assert 0.25 < busy.used_s() < 5
    busy.end()
    assert busy.used_s() == 0
