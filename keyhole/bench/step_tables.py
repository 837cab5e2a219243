"""The tables of `keyhole bench zo | lomo | lsp`: a line per case, beside its baselines and its floor.

    compute   streamed: the resident step of the same method and shape
    link      bytes that cross per step: each way at the rate of that way alone, and what goes both ways at the duplex
              rate of the same run; the longest of the three
    floor     streamed: the larger of both, since with perfect overlap the longer one hides the shorter; resident: the
              larger of the step's own products and of the CPU's updates

If what a value needs was not measured, the cell is empty: nothing is guessed or scaled.
"""

from dataclasses import dataclass

from keyhole.bench.cases import BASELINES, RESIDENT, STREAMED, TEXTBOOK, Case, Table
from keyhole.bench.report import Cells, Record, Report, number, table
from keyhole.bench.shapes import BLOCKS
from keyhole.machine.sizes import GIB, MIB
from keyhole.machine.text import markdown

NOTES = """\
tok/s and ratios are medians over the timed steps; +- is (max - min) / 2 over the median. "vs best native": tok/s over
those of the fastest baseline of this run that computes the same rule on the same batches, eager or compiled, which
stands beside it with its memory; "vs textbook": over the in-memory MeZO loop's as published. "products": the step's
matrix products alone, of the same shapes and without a pause, timed directly after it; "compute": the resident step;
"link": the bytes that cross over the rates measured in the same process, each way alone, and what goes both ways at the
duplex rate; "updates": seconds in which the CPU updated parameters; "vs floor": the step over the largest of them.
"down": so much of what came up was written back. GPU GiB are the allocator's peaks, allocated, reserved and planned;
host GiB the peak resident set of the process. "blocks" says how many ran where that is not all: times are those of the
blocks that ran, not scaled. A baseline's memory is its own. "losses" compares, bit for bit and from the same weights,
streamed with resident, and a run with parts switched off with the streamed one."""
STEP_PARTS = {"update_s": "updates s", "host_wait_s": "host waited s", "gpu_updates": "updated by GPU"}


@dataclass
class Line:
    """A case, its measurements, and comparisons with other cases of the run."""

    case: Case
    record: Record  # {} if it was not measured
    found: Record  # all measured cases, by name

    @property
    def step_s(self) -> float:
        return float(self.record["step_s"])

    @property
    def tok_s(self) -> float:
        return float(self.record.get("tokens", self.case.tokens) / self.step_s)

    def against(self, name: str) -> float | None:
        other = self.found.get(name)
        return None if other is None else self.tok_s * other["step_s"] / other.get("tokens", self.case.tokens)

    @property
    def to_textbook(self) -> float | None:
        return None if self.case.title else self.against(self.case.companion(TEXTBOOK))

    @property
    def best_native(self) -> Record | None:
        cases = ((r, Case(**r["case"])) for r in self.found.values())
        same = (r for r, case in cases if case.system in BASELINES and case.work == self.case.work)
        return min(same, key=lambda r: float(r["step_s"]), default=None)

    @property
    def compute_s(self) -> float | None:
        if self.case.system != STREAMED:
            return None
        resident = self.found.get(self.case.compare or self.case.companion(RESIDENT))
        return resident["step_s"] if resident else None

    @property
    def link_s(self) -> float | None:
        link, r = self.record.get("link"), self.record
        if self.case.system != STREAMED or not link:
            return None if self.case.system != STREAMED or r.get("bytes_up") else 0.0
        both_bytes = min(r["bytes_up"], r["bytes_down"])
        return float(max(r["bytes_up"] / link["up"], r["bytes_down"] / link["down"], both_bytes / link["duplex"])) / 1e9

    @property
    def floor(self) -> tuple[float | None, str]:
        """Seconds, and what it is."""
        if self.case.system != STREAMED:
            products_s = self.record.get("own_products_s")
            updates_s = self.record.get("parts", {}).get("update_s", 0.0)
            return (updates_s, "updates") if products_s and updates_s > products_s else (products_s, "products")
        if self.compute_s is None or self.link_s is None:
            return None, ""
        return max(self.compute_s, self.link_s), "link" if self.link_s > self.compute_s else "compute"

    @property
    def to_floor(self) -> float | None:
        return self.step_s / self.floor[0] if self.floor[0] else None

    @property
    def link_share(self) -> float | None:
        return self.link_s / self.step_s if self.link_s else None

    @property
    def same_losses(self) -> bool | None:
        """Whether losses equal the reference's bit for bit: resident for streamed, streamed for ablated."""
        if self.case.system != STREAMED or self.case.wire:
            return None
        ablated = self.case.load or set(self.case.options) - {"compile"}
        same = self.found.get(self.case.companion(STREAMED if ablated else RESIDENT))
        return self.record["losses"] == same["losses"] if same else None

    def cells(self) -> Cells:
        case, r = self.case, self.record
        found = {"case": case.name, "blocks": f"{case.blocks} of {BLOCKS[case.model]}" if case.blocks else ""}
        if not r:
            return found
        spread, device, planned = (r["max_s"] - r["min_s"]) / 2 / self.step_s, r["device"], r["planned_bytes"]
        found |= {"s/step": f"{self.step_s:.4f}", "+-": f"{spread:.1%}", "tok/s": f"{self.tok_s:,.0f}"}
        found["vs textbook"] = number(self.to_textbook, unit="x")
        if (best := self.best_native) is not None:
            found |= {
                "vs best native": number(self.against(best["name"]), unit="x"),
                "best native": f"{best['name']}, {best['device']['reserved_bytes'] / GIB:.1f} GiB",
            }
        moved, (floor_s, bound) = r["bytes_up"] > r["bytes_down"] > 0, self.floor
        found |= {
            "link s": number(self.link_s or None, ".4f"),
            "floor s": number(floor_s, ".4f"),
            "vs floor": number(self.to_floor, unit="x"),
            "bound by": bound if floor_s else "",
            "down": f"{r['bytes_down'] / r['bytes_up']:.0%}" if moved else "",
            "GPU GiB": f"{device['allocated_bytes'] / GIB:.2f}",
            "reserved": f"{device['reserved_bytes'] / GIB:.2f}",
            "planned": number(planned / GIB if planned else None),
            "host GiB": f"{r['host_bytes'] / GIB:.1f}",
            "losses": {True: "equal", False: "DIFFER", None: ""}[self.same_losses],
        }
        return found | {head: number(r["parts"].get(key), ".4f") for key, head in STEP_PARTS.items()}


class StepReport(Report):
    def lines(self, shown: Table) -> list[Line]:
        found = self.ok()
        return [Line(case, found.get(case.name, {}), found) for case in shown.cases]

    def sections(self) -> list[str]:
        shown = [(each.title, table([line.cells() for line in self.lines(each)])) for each in self.tables.values()]
        parts = [NOTES, *(f"## {title}\n\n{cells}" for title, cells in shown)]
        rates = ("up", "down", "duplex", "duplex_median")
        links = [r for r in self.records if r["kind"] == "link"]
        rows = [[f"{r['unit_bytes'] / MIB:.0f}", *(f"{r[rate]:.1f}" for rate in rates)] for r in links]
        head = ["copy MiB", "up GB/s", "down GB/s", "both at once, each way", "median of that"]
        return [*parts, "## Link", markdown(head, rows)] if rows else parts

    def differing(self) -> list[str]:
        lines = [line for each in self.tables.values() for line in self.lines(each) if line.record]
        return sorted({line.case.name for line in lines if line.same_losses is False})

    def line(self, found: Record) -> str:
        if found["kind"] == "link":
            rates = ", ".join(f"{name} {found[name]:.1f}" for name in ("up", "down", "duplex"))
            return f"link, copies of {found['unit_bytes'] / MIB:.0f} MiB: {rates} GB/s"
        if found.get("status") != "ok":
            return super().line(found)
        reserved_gib, host_gib = found["device"]["reserved_bytes"] / GIB, found["host_bytes"] / GIB
        return (
            f"{found['name']:<40} {found['step_s']:.4f} s/step ({found['min_s']:.4f}-{found['max_s']:.4f}, wall "
            f"{found['wall_s']:.4f}), GPU {reserved_gib:.2f} GiB, host {host_gib:.1f} GiB, "
            f"loss {found['losses'][-1]:.4f}, loaded in {found['load_s']:.1f} s"
        )
