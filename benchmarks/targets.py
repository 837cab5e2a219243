"""The targets of our own runs, and whether they are met.

    python benchmarks/targets.py benchmarks/records/zo_h200_2026-11-15_i.json [more files]

Reads the JSON that `keyhole bench zo` or `keyhole bench snapshots` wrote. Zeroth-order: 2048-token sequences, random
weights, every row timed in one run; a ratio is tok/s over tok/s of the textbook loop. Snapshots: tok/s with checkpoints
in the background over tok/s with none. A target without a measurement is "missing", never passed. A quick run gets no
verdicts, because tiny shapes prove nothing.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keyhole.bench import snapshots
from keyhole.bench.cases import STREAMED, TABLES, Case, read_tables
from keyhole.bench.report import Record
from keyhole.bench.step_tables import Line
from keyhole.machine.sizes import GIB
from keyhole.machine.text import markdown

HOST_FACTOR, HOST_SLACK_BYTES = 1.03, 2 * GIB
FLOORS, SHORT_FLOORS = 1.10, 1.15  # a step over max(compute, link); of short batches
SNAPSHOTS = 0.97  # of the tokens per second without


@dataclass(frozen=True)
class Target:
    """A number of a case that must be at least, or at most, some limit."""

    what: str
    case: Case
    of: Callable[[Line], float | None]
    limit: float
    unit: str = "x"
    at_most: bool = False

    def row(self, line: Line, error: str) -> "Row":
        target = f"{'<=' if self.at_most else '>='} {self.limit:.3g}{self.unit}"
        value = self.of(line) if line.record else None
        if value is None:
            return Row(
                self.what, self.case.name, target, (error if not line.record else "not measured")[:80], "missing"
            )
        passed = value <= self.limit if self.at_most else value >= self.limit
        return Row(self.what, self.case.name, target, f"{value:.3g}{self.unit}", "pass" if passed else "FAIL")


@dataclass
class Row:
    """One line of the table of targets."""

    what: str
    case: str
    target: str
    measured: str
    verdict: str  # pass | FAIL | missing


def _speed(limit: float, case: Case) -> Target:
    return Target(f"{case.system} against textbook", case, lambda line: line.to_textbook, limit)


def _link(model: str) -> Target:
    share = lambda line: 100 * line.link_share if line.link_share else None  # noqa: E731
    return Target("share of what the link can do", Case(model, STREAMED), share, 92, " %")


def _reserved(limit: float, case: Case, what: str = "GPU memory reserved") -> Target:
    return Target(what, case, lambda line: line.record["device"]["reserved_bytes"] / GIB, limit, " GiB", at_most=True)


TARGETS = [
    *(_speed(2.0, Case(model, "resident")) for model in ("1.3B", "6.7B", "13B")),
    _speed(1.5, Case("1.3B", STREAMED)),
    *(_speed(0.93, Case(model, STREAMED)) for model in ("6.7B", "13B")),
    *(_link(model) for model in ("6.7B", "13B")),
    *(_speed(1.35, Case(model, STREAMED, batch=4)) for model in ("6.7B", "13B")),
    _speed(1.1, Case("6.7B", STREAMED, dtype="fp32")),
    _speed(1.3, Case("13B", STREAMED, gpu_memory="16GiB")),
    _reserved(2.5, Case("13B", STREAMED)),
    _reserved(8.0, Case("175B", STREAMED, blocks=4)),
    _reserved(4.0, Case("175B", STREAMED, blocks=4, gpu_memory="4GiB"), "GPU memory reserved (stretch)"),
]
BUDGETS = [Case("13B", STREAMED, gpu_memory=f"{n}GiB").name for n in (4, 8, 16, 24)]


def of_any_streamed(line: Line, floors: float) -> list[Target]:
    """What holds for any streamed case. floors: how many times max(compute, link) its step may take."""
    limit_gib = (HOST_FACTOR * line.record.get("weights_bytes", 0) + HOST_SLACK_BYTES) / GIB
    return [
        Target("step against max(compute, link)", line.case, lambda x: x.to_floor, floors, at_most=True),
        Target("host memory", line.case, lambda x: x.record["host_bytes"] / GIB, limit_gib, " GiB", at_most=True),
        Target("planned peak off the measured one by", line.case, _off, 10, " %", at_most=True),
        Target("losses equal the resident ones", line.case, lambda x: x.same_losses, 1, ""),
    ]


def _off(line: Line) -> float | None:
    reserved = line.record["device"]["reserved_bytes"]
    return 100 * abs(line.record["planned_bytes"] / reserved - 1) if reserved else None


def judge_zo(records: list[Record]) -> list[Row]:
    """Every target of zeroth-order steps: speed, budgets, memory, and what holds for any streamed case. Short batches
    have a table of their own, which is judged where it was run."""
    found, tables = {r["name"]: r for r in records if r["kind"] == "case"}, read_tables(TABLES / "zo.yaml")
    measured = {name: r for name, r in found.items() if r["status"] == "ok"}

    def line(case: Case) -> Line:
        return Line(case, measured.get(case.name, {}), measured)

    targets = list(TARGETS)
    for name, floors in (("judged", FLOORS), ("short", SHORT_FLOORS)):
        cases = [case for case in tables[name].cases if name == "judged" or case.name in found]
        targets += [t for case in cases if case.system == STREAMED for t in of_any_streamed(line(case), floors)]
    rows = [
        target.row(line(target.case), found.get(target.case.name, {}).get("error", "not run")) for target in targets
    ]
    steps_s = [measured[name]["step_s"] for name in BUDGETS if name in measured]
    falls = all(a > b for a, b in zip(steps_s, steps_s[1:], strict=False))
    verdict = "missing" if len(steps_s) < len(BUDGETS) else "pass" if falls else "FAIL"
    told = " ".join(f"{s:.3f}" for s in steps_s) + " s"
    what = "step time falls as the budget grows"
    return [*rows, Row(what, "13B-bf16-b1-streamed-*GiB", "4 > 8 > 16 > 24 GiB", told, verdict)]


def judge_snapshots(rows: list[Record]) -> list[Row]:
    """Checkpoints in the background must not slow a run down."""
    measured, found = snapshots.by_mode(rows), []
    for (model, mode), record in measured.items():
        if mode == snapshots.BACKGROUND and (model, snapshots.NONE) in measured:
            ratio = record["tokens_per_s"] / measured[model, snapshots.NONE]["tokens_per_s"]
            verdict = "pass" if ratio >= SNAPSHOTS else "FAIL"
            found.append(Row("tok/s against none", model, f">= {SNAPSHOTS:g}x", f"{ratio:.3f}x", verdict))
    return found


def verdicts(path: Path) -> str:
    """The table of a file, or why there is none."""
    found = json.loads(path.read_text())
    if found.get("quick"):
        return "a quick run proves nothing"
    records = found["records"]
    saved = any(r.get("case", {}).get("saving") for r in records)
    rows = judge_snapshots(records) if saved else judge_zo(records)
    return markdown(["what", "case", "target", "measured", "verdict"], [list(vars(row).values()) for row in rows])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}\n\n{verdicts(Path(name))}\n")
