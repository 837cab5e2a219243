"""The table of `keyhole bench memory`: the parts of every trial, beside their floors."""

from pathlib import Path

from keyhole.bench.memory.ledger import ACTIVATIONS, PARTS
from keyhole.bench.report import Record, Report, grid
from keyhole.machine.sizes import GIB, MIB

NOTES = """\
Each part is shown at its own peak, with its floor in brackets: what the shapes alone demand. "sum" adds these peaks, as
LOMO's Table 1 does; "peak" is the most that was held at one instant, which is less where gradients grow while
activations are freed. "vs floor": the peak over the sum of the floors, where all parts have one. "allocator": the peak
of PyTorch's allocator in the same step, with kernels' workspaces and its rounding. "largest part": of the peak.
Activations are whatever is not one of the other three: what is kept for the backward, logits, one block that runs
again."""


class MemoryReport(Report):
    """One line per trial."""

    def __init__(self, out: Path, command: str, quick: bool) -> None:
        super().__init__("memory", out, command, quick)
        self.unit, self.unit_bytes = ("MiB", MIB) if quick else ("GiB", GIB)
        self.header = ["trial", "tokens", *(f"{part} {self.unit}" for part in PARTS)]
        self.header += ["sum", "peak", "vs floor", "allocator", "largest part"]

    def sections(self) -> list[str]:
        return [NOTES, grid(self.header, [self.cells(r) for r in self.records])]

    def cells(self, r: Record) -> list[str]:
        if r["status"] != "ok":
            return [r["name"], f"{r['status']}: {r['error'][:200]}", *[""] * (len(self.header) - 2)]
        own, floor, at_peak = r["own"], r["floor"], r["at_peak"]
        peak, allocated = sum(at_peak.values()), r["device"]["allocated_bytes"]
        whole = sum(floor.values()) if ACTIVATIONS in floor and len(floor) == len(PARTS) else None
        largest = max(at_peak, key=at_peak.get)
        return [
            r["name"],
            str(r["tokens"]),
            *(self.size(own[part]) + (f" ({self.size(floor[part])})" if part in floor else "") for part in PARTS),
            self.size(sum(own.values())),
            self.size(peak),
            f"{peak / whole:.2f}x" if whole else "",
            self.size(allocated) if allocated else "",
            f"{largest}, {at_peak[largest] / peak:.0%}",
        ]

    def size(self, count: int) -> str:
        return f"{count / self.unit_bytes:.2f}"
