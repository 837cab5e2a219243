"""The targets of our own runs, and whether they are met.

    python benchmarks/targets.py benchmarks/records/zo_h200_2026-11-15_i.json [more files]

Reads the JSON that `keyhole bench zo` or `keyhole bench snapshots` wrote. Zeroth-order: 2048-token sequences, random
weights, every row timed in one run; a ratio is tok/s over tok/s of the textbook loop. Snapshots: tok/s with checkpoints
in the background over tok/s with none. A target without a measurement is "missing", never passed. A quick run gets no
verdicts, because tiny shapes prove nothing.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.bench.report import Record, grid
from keyhole.bench.snapshots.report import none_of, ratio
from keyhole.bench.zo.cases import Case, read_tables
from keyhole.bench.zo.floors import Line, cases_of, line_of
from keyhole.machine.sizes import GIB

HOST_FACTOR, HOST_SLACK_BYTES = 1.03, 2 * GIB
FLOORS, SHORT_FLOORS = 1.10, 1.15  # a step over max(compute, link); of short batches
SNAPSHOTS = 0.97  # of the tokens per second without


@dataclass
class Row:
    """One line of the table of targets."""

    what: str
    case: str
    target: str
    measured: str
    verdict: str  # pass | FAIL | missing


def judge_zo(records: list[Record]) -> list[Row]:
    """Every target of zeroth-order steps: speed, budgets, memory, and what holds for any streamed case. Short batches
    have a table of their own, which is judged where it was run."""
    found, tables = cases_of(records), read_tables()
    lines = {case.name: line_of(case, found) for case in tables["judged"].cases}
    short = [line_of(case, found) for case in tables["short"].cases if case.name in found]
    return [
        *_speed(lines),
        *_budgets(lines),
        *_memory(lines),
        *[row for line in lines.values() if line.case.system == "streamed" for row in _every_streamed(line, FLOORS)],
        *[row for line in short if line.case.system == "streamed" for row in _every_streamed(line, SHORT_FLOORS)],
    ]


def judge_snapshots(rows: list[Record]) -> list[Row]:
    """Checkpoints in the background must not slow a run down."""
    found = []
    for row in (row for row in rows if row["mode"] == "background"):
        value = ratio(row, none_of(row, rows))
        verdict = "pass" if value >= SNAPSHOTS else "FAIL"
        found.append(Row("tok/s against none", row["model"], f">= {SNAPSHOTS:g}x", f"{value:.3f}x", verdict))
    return found


def _row(what: str, line: Line, target: str, value: float | None, unit: str, passed: bool | None) -> Row:
    if not line.ok:
        return Row(what, line.case.name, target, str(line.record.get("error", ""))[:80], "missing")
    if value is None or passed is None:
        return Row(what, line.case.name, target, "not measured", "missing")
    return Row(what, line.case.name, target, f"{value:.3g}{unit}", "pass" if passed else "FAIL")


def _at_least(what: str, line: Line, value: float | None, limit: float, unit: str = "x") -> Row:
    return _row(what, line, f">= {limit:g}{unit}", value, unit, None if value is None else value >= limit)


def _at_most(what: str, line: Line, value: float | None, limit: float, unit: str) -> Row:
    return _row(what, line, f"<= {limit:.3g}{unit}", value, unit, None if value is None else value <= limit)


def _speed(lines: dict[str, Line]) -> list[Row]:
    def speed(limit: float, **settings: Any) -> Row:
        line = lines[Case(**settings).name]
        return _at_least(f"{line.case.system} against textbook", line, line.to_textbook, limit)

    rows = [speed(2.0, model=model, system="resident") for model in ("1.3B", "6.7B", "13B")]
    rows.append(speed(1.5, model="1.3B", system="streamed"))
    for model in ("6.7B", "13B"):
        rows.append(speed(0.93, model=model, system="streamed"))
        line = lines[Case(model, "streamed").name]
        share = None if line.link_share is None else 100 * line.link_share
        rows.append(_at_least("share of what the link can do", line, share, 92, " %"))
    rows += [speed(1.35, model=model, system="streamed", batch=4) for model in ("6.7B", "13B")]
    rows.append(speed(1.1, model="6.7B", system="streamed", dtype="fp32"))
    rows.append(speed(1.3, model="13B", system="streamed", gpu_memory="16GiB"))
    return rows


def _budgets(lines: dict[str, Line]) -> list[Row]:
    """Step time falls as the budget grows."""
    budgets = [lines[Case("13B", "streamed", gpu_memory=f"{n}GiB").name] for n in (4, 8, 16, 24)]
    what = ("step time falls as the budget grows", "13B-bf16-b1-streamed-*GiB", "4 > 8 > 16 > 24 GiB")
    if not all(line.ok for line in budgets):
        return [Row(*what, "", "missing")]
    steps_s = [line.record["step_s"] for line in budgets]
    falls = all(a > b for a, b in zip(steps_s, steps_s[1:], strict=False))
    return [Row(*what, " ".join(f"{s:.3f}" for s in steps_s) + " s", "pass" if falls else "FAIL")]


def _memory(lines: dict[str, Line]) -> list[Row]:
    def reserved(case: Case, limit_gib: float, what: str = "GPU memory reserved") -> Row:
        line = lines[case.name]
        value = line.record["device"]["reserved_bytes"] / GIB if line.ok else None
        return _at_most(what, line, value, limit_gib, " GiB")

    return [
        reserved(Case("13B", "streamed"), 2.5),
        reserved(Case("175B", "streamed", blocks=4), 8.0),
        reserved(Case("175B", "streamed", blocks=4, gpu_memory="4GiB"), 4.0, "GPU memory reserved (stretch)"),
    ]


def _every_streamed(line: Line, floors: float) -> list[Row]:
    """What holds for any streamed case. floors: how many times max(compute, link) its step may take."""
    rows = [_at_most("step against max(compute, link)", line, line.to_floor, floors, "x")]
    if line.ok:
        record = line.record
        limit_gib = (HOST_FACTOR * record["weights_bytes"] + HOST_SLACK_BYTES) / GIB
        rows.append(_at_most("host memory", line, record["host_bytes"] / GIB, limit_gib, " GiB"))
        reserved = record["device"]["reserved_bytes"]
        off = 100 * abs(record["planned_bytes"] / reserved - 1) if reserved else None
        rows.append(_at_most("planned peak off the measured one by", line, off, 10, " %"))
        if line.same_losses is not None:
            word, verdict = ("equal", "pass") if line.same_losses else ("differ", "FAIL")
            rows.append(Row("losses equal the resident ones", line.case.name, "bit for bit", word, verdict))
    return rows


def verdicts(path: Path) -> str:
    """The table of a file, or why there is none."""
    found = json.loads(path.read_text())
    if found.get("quick"):
        return "a quick run proves nothing"
    records = found.get("rows", found.get("records", []))  # rows: in older files of snapshots
    rows = judge_snapshots(records) if any("mode" in r for r in records) else judge_zo(records)
    return grid(["what", "case", "target", "measured", "verdict"], [list(vars(row).values()) for row in rows])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}\n\n{verdicts(Path(name))}\n")
