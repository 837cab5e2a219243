"""The floor of a step, and how near the step is to it.

    compute alone   the resident zo step of the same shape: every unit on the device, nothing crosses the link
    link alone      bytes that cross per step: each way at the measured rate of that way alone, and bytes that go both
                    ways at the duplex rate; the longest of the three
    floor           max of the two: with perfect overlap the longer one hides the shorter

A line joins a case's record with those of its companions: the textbook loop and the resident step of the same model,
dtype, batch and length. If a companion is missing, values that depend on it are None: nothing is guessed or scaled.
"""

from dataclasses import dataclass, replace
from typing import Any

from keyhole.bench.report import Record
from keyhole.bench.zo.cases import SWITCHES, Case


@dataclass
class Line:
    """One line of a table: a case, its measurements, and comparisons."""

    case: Case
    record: Record
    tok_s: float | None = None
    to_textbook: float | None = None  # tok/s over the textbook loop's
    compute_s: float | None = None
    link_s: float | None = None
    floor_s: float | None = None
    to_floor: float | None = None  # seconds over the floor's
    link_share: float | None = None  # share of the link's rate
    bound: str = ""
    same_losses: bool | None = None  # whether losses equal the reference bit for bit

    @property
    def ok(self) -> bool:
        return bool(self.record["status"] == "ok")


def reference(case: Case) -> str | None:
    """Name of the case whose losses this one must equal: resident for streamed, streamed for ablated."""
    if case.system != "streamed" or case.wire:
        return None
    return companion(case, "streamed" if case.switched_off else "resident")


def cases_of(records: list[Record]) -> dict[str, Record]:
    """Name -> record of the cases, the latest if a case was run again."""
    return {r["name"]: r for r in records if r["kind"] == "case"}


def companion(case: Case, system: str) -> str:
    """Name of the case that this one is compared with: everything on, no budget, the plain wire."""
    plain: dict[str, Any]
    plain = {"gpu_memory": None, "wire": None, **dict.fromkeys(SWITCHES, True)}
    plain |= {"compiled": case.compiled and system != "textbook"}
    return replace(case, system=system, **plain).name


def link_seconds(up_bytes: float, down_bytes: float, link: dict[str, float]) -> float:
    """The least time of the link (rates in GB/s, ../link.py)."""
    both_bytes = min(up_bytes, down_bytes)
    return max(up_bytes / link["up"], down_bytes / link["down"], both_bytes / link["duplex"]) / 1e9


def line_of(case: Case, found: dict[str, Record]) -> Line:
    """The line of a case from the records by name."""
    record = found.get(case.name, {"status": "missing", "error": "not run"})
    line = Line(case, record)
    if not line.ok:
        return line
    step_s = record["step_s"]
    line.tok_s = case.tokens / step_s
    textbook, resident = (found.get(companion(case, system), {}) for system in ("textbook", "resident"))
    if textbook.get("status") == "ok":
        line.to_textbook = textbook["step_s"] / step_s
    same = found.get(reference(case) or "", {})
    if same.get("status") == "ok":
        line.same_losses = record["losses"] == same["losses"]
    if case.system != "streamed":
        return line
    if record.get("link"):
        line.link_s = link_seconds(record["bytes_up"], record["bytes_down"], record["link"])
        line.link_share = line.link_s / step_s
    if resident.get("status") == "ok":
        line.compute_s = resident["step_s"]
    if line.compute_s and (line.link_s is not None or record["bytes_up"] == 0):
        line.floor_s = max(line.compute_s, line.link_s or 0.0)
        line.to_floor = step_s / line.floor_s
        line.bound = "link" if (line.link_s or 0.0) > line.compute_s else "compute"
    return line
