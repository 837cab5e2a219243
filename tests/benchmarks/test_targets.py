"""Verdicts and floors, from records with known numbers."""

from dataclasses import asdict
from typing import Any

from keyhole.bench.cases import Case, judged
from keyhole.bench.floors import GIB, line_of, link_seconds
from keyhole.bench.judged import judge

STEP_S = {"textbook": 1.0, "resident": 0.4, "streamed": 0.5}


def record(case: Case, **changes: Any) -> dict[str, Any]:
    """A record of a case that meets every target."""
    step_s = STEP_S[case.system] - (0.001 * int(case.gpu_memory[:-3]) if case.gpu_memory else 0)
    found = {
        "kind": "case",
        "name": case.name,
        "case": asdict(case),
        "status": "ok",
        "step_s": step_s,
        "losses": [1.0, 2.0],
        "bytes_up": 24.5e9,
        "bytes_down": 24.5e9,
        "link": {"up": 55.0, "down": 55.0, "duplex": 50.0},
        "weights_bytes": 20 * GIB,
        "host_bytes": 22 * GIB,
        "planned_bytes": 2 * GIB,
        "device": {"reserved_bytes": 2 * GIB},
    }
    return found | changes


def verdicts(**changes: Any) -> dict[tuple[str, str], str]:
    """(what, case) -> verdict, with `changes` applied to the case named in changes["name"]."""
    records = [record(c, **(changes if c.name == changes.get("name") else {})) for c in judged()]
    return {(row.what, row.case): row.verdict for row in judge(records)}


def test_all_targets_can_pass() -> None:
    """Good numbers give nothing but passes."""
    assert set(verdicts().values()) == {"pass"}


def test_each_number_can_fail_its_own_row() -> None:
    """A bad number turns the row that looks at it, and the case is named."""
    name = "13B-bf16-b1-streamed"
    for what, changes in {
        "streamed against textbook": {"step_s": 1.1},
        "share of what the link can do": {"bytes_up": 20e9, "bytes_down": 20e9},
        "step against max(compute, link)": {"step_s": 0.56},
        "GPU memory reserved": {"device": {"reserved_bytes": 3 * GIB}},
        "host memory": {"host_bytes": 23 * GIB},
        "planned peak off the measured one by": {"planned_bytes": 3 * GIB},
        "losses equal the resident ones": {"losses": [1.0, 2.5]},
    }.items():
        assert verdicts(name=name, **changes)[what, name] == "FAIL"
    slow = verdicts(name="13B-bf16-b1-streamed-24GiB", step_s=0.9)
    assert slow["step time falls as the budget grows", "13B-bf16-b1-streamed-*GiB"] == "FAIL"
    resident = verdicts(name="1.3B-bf16-b1-resident", step_s=0.6)
    assert resident["resident against textbook", "1.3B-bf16-b1-resident"] == "FAIL"


def test_what_was_not_measured_is_missing() -> None:
    """No records, no passes; a failed case shows its error."""
    assert {row.verdict for row in judge([])} == {"missing"}
    failed = {"kind": "case", "name": "1.3B-bf16-b1-streamed", "status": "error", "error": "out of memory"}
    rows = {row.case: row for row in judge([failed])}
    assert rows["1.3B-bf16-b1-streamed"].measured == "out of memory"


def test_the_floor_is_the_larger_of_compute_and_link() -> None:
    """24.5 GB each way over 50 GB/s is 0.49 s, more than the 0.4 s of compute."""
    case = Case("13B", "streamed")
    found = {r["name"]: r for r in map(record, judged())}
    line = line_of(case, found)
    assert (line.compute_s, line.link_s, line.bound) == (0.4, 0.49, "link")
    assert abs(line.to_floor - 0.5 / 0.49) < 1e-9 and line.to_textbook == 2.0 and line.same_losses
    found[case.name] = record(case, bytes_up=1e9, bytes_down=1e9)
    line = line_of(case, found)
    assert (line.floor_s, line.bound) == (0.4, "compute")


def test_the_link_is_shared_only_by_what_goes_both_ways() -> None:
    """Many more bytes up than down take what up takes alone; as many, what they take at the duplex rate."""
    link = {"up": 60.0, "down": 50.0, "duplex": 40.0}
    for up_bytes, down_bytes, expected_s in ((9e9, 2e9, 0.15), (2e9, 7.5e9, 0.15), (4e9, 4e9, 0.1)):
        assert abs(link_seconds(up_bytes, down_bytes, link) - expected_s) < 1e-9
