"""Reports of made-up measurements, cell by cell: what is divided by what, and what is left empty."""

import re
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from keyhole.bench.cases import Case, Table
from keyhole.bench.report import Report
from keyhole.bench.snapshots import SnapshotReport
from keyhole.bench.step_tables import StepReport
from keyhole.machine.sizes import GIB, MIB

DEVICE = {"allocated_bytes": 3 * GIB, "reserved_bytes": 7 * GIB // 2}
OWN = {"kind": "case", "status": "ok", "device": DEVICE, "host_bytes": 5 * GIB, "load_s": 7.0, "wall_s": 3.0}
OWN |= {
    "weights_bytes": 3 * GIB,
    "planned_bytes": 4 * GIB,
    "parts": {},
    "losses": [2.0, 1.5],
    "bytes_up": 0.0,
    "bytes_down": 0.0,
}
LINK = {"up": 50.0, "down": 40.0, "duplex": 30.0, "duplex_median": 29.0, "unit_bytes": 192 * MIB}


def case(system: str, method: str = "lomo", **more: Any) -> Case:
    return Case("6.7B", system, method, batch=2, length=500, **more)


def of_step(made: Case, step_s: float, **more: Any) -> dict[str, Any]:
    times = {"step_s": step_s, "min_s": 0.9 * step_s, "max_s": 1.2 * step_s}
    return OWN | {"name": made.name, "case": asdict(made)} | times | more


STREAMED = {"bytes_up": 80e9, "bytes_down": 60e9, "link": LINK}
SWITCHED = {"load": {"overlap": False}}
STEPS = [
    (case("native", options={"optimizer": "SGD"}), {"step_s": 2.5, "planned_bytes": None, "own_products_s": 1.25}),
    (case("native", options={"optimizer": "AdamW"}), {"step_s": 5.0}),
    (case("textbook"), {"step_s": 8.0}),
    (case("resident"), {"step_s": 2.0, "own_products_s": 0.5, "parts": {"update_s": 1.0, "host_wait_s": 0.25}}),
    (case("streamed"), {"step_s": 4.0, **STREAMED}),
    (case("streamed", gpu_memory="9GiB"), {"step_s": 2.2, "bytes_up": 9e10, "bytes_down": 2e9, "link": LINK}),
    (case("streamed", gpu_memory="8GiB"), {"step_s": 5.0, "bytes_up": 4e9, "bytes_down": 1e11, "link": LINK}),
    (case("streamed", **SWITCHED), {"step_s": 3.0, "losses": [2.0, 1.75], **STREAMED, "link": None}),
    (case("streamed", wire="fp32", micro_batches=3, blocks=4), {"step_s": 6.0, "tokens": 1200, "bytes_up": 0.0}),
]
LOST = case("streamed", title="lost")
SAVED = {"write_s": [2.0, 3.0], "training_waited_s": [0.5, 0.25], "copies_bytes": GIB}
SNAPSHOTS = [
    (
        Case("1.3B", system, "zo", saving=saving),
        {"wall_s": wall_s, "steps": steps, "tokens_per_s": 1500.0 + wall_s} | own,
    )
    for system, saving, wall_s, steps, own in (
        ("resident", "", 4.0, 10, {}),
        (
            "resident",
            "background",
            10.0,
            20,
            {"write_s": [2.0, 3.0], "training_waited_s": [0.5, 0.25], "copies_bytes": GIB},
        ),
        ("resident", "torch.save", 6.0, 10, {"write_s": [2.5]}),
        ("resident", "replay", 0.5, 1000, {}),
        ("textbook", "", 8.0, 10, {}),
        ("textbook", "torch.save", 9.0, 10, {"write_s": [1.0]}),
    )
]


def filled(cls: type[Report], rows: list[tuple[Case, dict[str, Any]]], path: Path) -> Report:
    cases = [made for made, _ in rows]
    report = cls("made", path, "keyhole bench made", False, {"one": Table("One", [*cases, LOST])})
    report.started = datetime(2026, 11, 19)
    report.machine = {"gpus": [{"name": "NVIDIA H200"}], "versions": {"torch": "2.11"}, "cuda": {"driver": 5}}
    for made, more in rows:
        report.records.append(of_step(made, **{"step_s": 1.0} | more))
    report.records[1:1] = [{"kind": "link", **LINK}] if cls is StepReport else []
    report.records.append({"kind": "case", "name": LOST.name, "status": "error", "error": "no memory"})
    return report


FILE = Path(__file__).with_name("reported.txt")  # python -m tests.bench.test_report rewrites it, and its diff is read
REPORTS = [(StepReport, STEPS), (SnapshotReport, SNAPSHOTS)]


def told(report: Report) -> str:
    """The tables, without the words before them; and the lines of the terminal."""
    text = report.markdown()
    found = [text[: text.index("\n- commit")], text[text.index("| ") :], *map(report.line, report.records)]
    lines = "\n".join(found).split("\n")
    return "\n".join(re.sub(r" *\| *", "|", line) for line in lines if line and "---" not in line)


@pytest.mark.parametrize("number", range(2))
def test_every_cell(number: int, tmp_path: Path) -> None:
    report = filled(*REPORTS[number], tmp_path)
    assert told(report).split("\n") == FILE.read_text().split("\n\n")[number].strip().split("\n")
    assert report.differing() == ([] if number else ["6.7B-bf16-b2-t500-streamed-no_overlap"])


if __name__ == "__main__":
    FILE.write_text("\n\n".join(told(filled(cls, rows, Path())) for cls, rows in REPORTS) + "\n")
