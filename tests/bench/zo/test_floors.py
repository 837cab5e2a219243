"""Floors, from records with known numbers."""

from dataclasses import asdict
from typing import Any

from keyhole.bench.zo.cases import Case, read_tables
from keyhole.bench.zo.floors import line_of, link_seconds

STEP_S = {"textbook": 1.0, "resident": 0.4, "streamed": 0.5}


def record(case: Case, **changes: Any) -> dict[str, Any]:
    found = {"kind": "case", "name": case.name, "case": asdict(case), "status": "ok", "step_s": STEP_S[case.system]}
    found |= {"losses": [1.0, 2.0], "bytes_up": 24.5e9, "bytes_down": 24.5e9}
    return found | {"link": {"up": 55.0, "down": 55.0, "duplex": 50.0}} | changes


def test_the_floor_is_the_larger_of_compute_and_link() -> None:
    """24.5 GB each way over 50 GB/s is 0.49 s, more than the 0.4 s of compute."""
    case = Case("13B", "streamed")
    found = {r["name"]: r for r in map(record, read_tables()["judged"].cases)}
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
