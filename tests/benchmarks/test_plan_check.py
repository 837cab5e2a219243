"""Planned against measured: the cases cover what they should, and one runs."""

import torch

from benchmarks.plan_check import CASES, HOST, run, summary
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
    assert 0 < found["used"]["cpu_s"] and found["used"]["without_core_s"] >= 0
