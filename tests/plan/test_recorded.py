"""The planner against peaks and seconds that were measured on an H200 (benchmarks/records/), and what its parts say."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.plan_check import PARTS, RECORDS, recorded, summary
from keyhole.bench.shapes import opt_config
from keyhole.methods import METHODS
from keyhole.methods.workload import Room, Workload
from keyhole.model.structure.layout import Layout, find_layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan.seconds import profile, trust
from keyhole.plan.table import Question, make_row, process_bytes

MODULES: dict[str, Any] = {}
BF16 = torch.bfloat16
H200 = profile("h200")


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("zo_h200_2026-11-15_e", "streamed  4x2048"),
        ("zo_h200_2026-11-15_h", "13B streamed .*1x2048"),
        ("lomo_h200_2026-11-16", "7B"),
    ],
)
def test_planned_as_measured(name: str, only: str) -> None:
    """Within 10 % of memory and 15 % of time. Two kinds of cases are not compared in host memory, because their process
    still held what a case before had left: page-locked inputs, or (lomo, eager) the compiler. Cases of zo with four
    samples are those of the record before OPT's ReLU became a part of a product, as it no longer is: 10 % of their
    memory."""
    lines = [line for line in recorded(RECORDS / f"{name}.json") if re.search(only, line.case.name)]
    if name.endswith("_e"):
        lines = [line for line in lines if not line.case.options.get("compile")]
    assert lines
    for line in lines:
        held = "inputs on the GPU" in line.case.name or (
            line.case.method == "lomo" and "compiled" not in line.case.name
        )
        for part, (_, _, limit) in PARTS.items():
            if part != "host" or not held:
                assert line.ratio(part) == pytest.approx(1, abs=limit), (line.case.name, part)


@pytest.mark.parametrize("letter", ["f", "g", "h", "i", "j"])
def test_a_check_on_a_gpu_planned_by_the_code_of_today(letter: str) -> None:
    """Runs of plan_check.py with the rates that were measured in them: bytes within 10 %, seconds within 20 % for
    models of 3B and more and within a factor of two below, where launches decide, and nearly all pairs in the right
    order. A budget is never exceeded. (Streamed `lsp` is planned as it is placed since the run i. `apollo-mini` was
    measured when it had no state in host memory.)"""
    lines = list(recorded(RECORDS / f"plan_check_h200_2026-11-17_{letter}.json"))
    lines = [line for line in lines if line.case.method != "apollo-mini"]
    assert len(lines) >= 18
    for line in lines:
        limits = {part: limit for part, (_, _, limit) in PARTS.items()}
        limits["seconds"] = 0.5 if line.case.model == "1.3B" else 0.20
        if (line.case.method, line.case.system) != ("lsp", "streamed") or letter in "ij":
            assert all(abs(line.ratio(part) - 1) <= limit for part, limit in limits.items()), line
            assert line.case.gpu_memory is None or line.ratio("gpu") >= 1, line
    assert float(summary(lines)[-1].rpartition(", ")[2].rstrip("%")) >= 95


@cache
def opt() -> Layout:
    return find_layout(build(opt_config("1.3B"), BF16))


def work(method: str, **options: Any) -> Workload:
    return Workload(method, 4096, 1, METHODS[method].settings(**options), length=1024)


ROOM = Room(Wire(BF16), 32 * 2**20, 130 * 2**30)


def test_the_process_by_what_it_loads() -> None:
    """More with autograd, with kernels of our own, and with a compiler; the least is that of a CPU."""
    rows = METHODS
    zo, sgd, lomo = (process_bytes(rows[name], rows[name].settings(), True) for name in ("zo", "sgd", "lomo"))
    compiled = process_bytes(rows["lomo"], rows["lomo"].settings(compile=True), True)
    assert process_bytes(rows["lomo"], None, False) < zo < sgd < lomo < compiled


def test_a_whole_step_of_zo_is_one_graph_if_there_is_room() -> None:
    """It launches nothing and holds the weights three times while it is captured; on a small GPU, for long batches, or
    with units in host memory it is not captured. It never decides whether a model fits."""
    short = replace(work("zo"), tokens=512, length=512, passes=2)
    zo = METHODS["zo"]
    found = zo.planned_work(opt(), set(), short, ROOM, H200)
    planned = zo.planned_bytes(opt(), set(), short, ROOM)
    assert found.launches == 0 and found.nodes == 2 * 24 * 12 and found.kept_bytes >= 2 * planned.homes
    small = planned.total + 4 * planned.homes - 1
    for asked, streamed, room in (
        (short, set(), replace(ROOM, limit_bytes=small)),
        (replace(short, tokens=8192), set(), ROOM),
        (short, {unit.index for unit in opt().of_kind("block")}, ROOM),
    ):
        usual = zo.planned_work(opt(), streamed, asked, room, H200)
        assert usual.nodes == usual.kept_bytes == 0 < usual.launches
    question = Question(build(opt_config("1.3B"), BF16), BF16, H200, planned.total, 2**40, 1, 512)
    row = make_row(question, zo, "resident", None, opt(), set())
    assert row.fits and row.gpu_bytes == planned.total


def test_a_plan_says_how_near_its_seconds_are() -> None:
    assert "20 %" in trust(replace(H200, measured=True), 10**10) and "25 %" in trust(H200, 10**10)
    assert "factor of two" in trust(replace(H200, measured=True), 10**9)
