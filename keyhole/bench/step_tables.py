"""The tables of `keyhole bench zo | lomo | lsp`: a line per case, beside its baselines and its floor.

    compute   the resident step of the same method and shape; without one, the products at the rate of a large product
    link      bytes that cross per step at the rates of the same run (floors.py)
    floor     streamed: the larger of both, since with perfect overlap the longer one hides the shorter; resident
              first-order steps: the larger of products and updates

If what a value needs was not measured, the cell is empty: nothing is guessed or scaled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from keyhole.bench.cases import NATIVE, RESIDENT, STREAMED, TEXTBOOK, Case, Table
from keyhole.bench.floors import link_seconds, product_flop
from keyhole.bench.report import Columns, Record, Report, grid, number, table_of
from keyhole.bench.shapes import BLOCKS
from keyhole.machine.sizes import GIB, MIB

ZEROTH, FIRST = "zeroth-order", "first-order"
ZO_NOTES = """\
tok/s and ratios are medians over the timed steps; +- is (max - min) / 2 over the median. "vs textbook" is tok/s over
the in-memory MeZO loop's. "compute" is the resident zo step, "link" the bytes that cross over the rates measured in the
same process: each way alone, and what goes both ways at the duplex rate. "vs floor": the step over the larger of both.
"own products": the step's matrix products of both signs alone, one after the other, timed directly after it.
"26 % down": so much of what came up was written back. GPU GiB is the peak that the allocator reserved, with the planned
peak in brackets; host GiB the peak resident set of the process. "blocks" says how many ran where that is not all: times
of such a row are those of the blocks that ran, not scaled. The textbook loop's memory is its own: what keyhole keeps of
the model is given back before. "losses" compares, bit for bit and from the same weights, streamed with resident, and a
run with parts switched off with the streamed one."""
GRADIENT_NOTES = """\
"vs SGD": tok/s over those of torch's optimizer on the plain module, with as many micro-batches. Floors: products, the
operations of the step's matrix products at the rate of one large product ({rate:.0f} TFLOP/s in bf16 here); updates,
seconds in which the CPU updated parameters; compute, the resident step of the same method, or its products; link,
the bytes that crossed at the rates of this run. "own products": the same products as the step's, of the same shapes and
without a pause, timed directly after it; "products" is never reached by them. GPU GiB: the allocator's peaks of
allocated and of reserved memory."""
PARTS_NOTE = """\
Seconds of the last step that the CPU updated, beside the GPU's work, and that launches waited for it. Updated by GPU:
the share of parameters whose state crossed the link for that (adam-offload)."""
STEP_PARTS = {"update_s": "updates, CPU", "host_wait_s": "host waited", "gpu_updates": "updated by GPU"}


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
        """tok/s over that of another case."""
        other = self.found.get(name)
        return None if other is None else self.tok_s * other["step_s"] / other.get("tokens", self.case.tokens)

    @property
    def to_textbook(self) -> float | None:
        return self.against(self.case.companion(TEXTBOOK))

    @property
    def products_s(self) -> float | None:
        rate = self.record.get("product_rate")
        return product_flop(self.case, self.record["tokens"]) / rate if rate and self.is_llama else None

    @property
    def is_llama(self) -> bool:
        return self.case.model.startswith("Llama-")

    @property
    def compute_s(self) -> float | None:
        if self.case.system != STREAMED:
            return None
        resident = self.found.get(self.case.compare or self.case.companion(RESIDENT))
        return resident["step_s"] if resident else self.products_s

    @property
    def link_s(self) -> float | None:
        link, r = self.record.get("link"), self.record
        if self.case.system != STREAMED or not link:
            return None if self.case.system != STREAMED or r.get("bytes_up") else 0.0
        return link_seconds(r["bytes_up"], r["bytes_down"], link)

    @property
    def floor(self) -> tuple[float | None, str]:
        """Seconds, and what it is."""
        if self.case.system == STREAMED:
            if self.compute_s is None or self.link_s is None:
                return None, ""
            return max(self.compute_s, self.link_s), "link" if self.link_s > self.compute_s else "compute"
        if self.products_s is None:
            return None, ""
        updates_s = self.record["parts"].get("update_s", 0.0)
        return (updates_s, "updates") if updates_s > self.products_s else (self.products_s, "products")

    @property
    def to_floor(self) -> float | None:
        return self.step_s / self.floor[0] if self.floor[0] else None

    @property
    def to_own(self) -> float | None:
        own_s = self.record.get("own_products_s")
        return self.step_s / own_s if own_s else None

    @property
    def link_share(self) -> float | None:
        return self.link_s / self.step_s if self.link_s else None

    @property
    def same_losses(self) -> bool | None:
        """Whether losses equal the reference's bit for bit: resident for streamed, streamed for ablated."""
        if self.case.system != STREAMED or self.case.wire:
            return None
        same = self.found.get(self.case.companion(STREAMED if self.case.load or self.switched else RESIDENT))
        return self.record["losses"] == same["losses"] if same else None

    @property
    def switched(self) -> bool:
        return bool(set(self.case.options) - {"compile"})


def _spread(line: Line) -> str:
    return f"{50 * (line.record['max_s'] - line.record['min_s']) / line.step_s:.1f} %"


def _setting(line: Line) -> str:
    """What is set, and how much was written back where that is less than came up."""
    case, up, down = line.case, line.record.get("bytes_up", 0), line.record.get("bytes_down", 0)
    words = [case.gpu_memory, *case.switches, case.wire]
    usual = case.options.get("deferred_update", True) and down < 0.9 * up
    return ", ".join(filter(None, [*words, f"{down / up:.0%} down" if usual else None]))


def _reserved(line: Line) -> str:
    planned = line.record["planned_bytes"]
    reserved = f"{line.record['device']['reserved_bytes'] / GIB:.2f}"
    return reserved + (f" ({planned / GIB:.2f})" if planned else "")


def _if_measured(columns: dict[str, Callable[[Line], str]]) -> dict[str, Callable[[Line], str]]:
    def shown(cell: Callable[[Line], str], line: Line) -> str:
        return cell(line) if line.record else ""

    return {head: partial(shown, cell) for head, cell in columns.items()}


ZO_COLUMNS: Columns[Line] = {
    "model": lambda line: line.case.model,
    "dtype": lambda line: line.case.dtype,
    "blocks": lambda line: f"{line.case.blocks} of {BLOCKS[line.case.model]}" if line.case.blocks else "all",
    "batch": lambda line: str(line.case.batch),
    "length": lambda line: str(line.case.length),
    "system": lambda line: line.case.system,
    "setting": _setting,
    **_if_measured(
        {
            "s/step": lambda line: f"{line.step_s:.4f}",
            "+-": _spread,
            "tok/s": lambda line: f"{line.tok_s:,.0f}",
            "vs textbook": lambda line: number(line.to_textbook, unit="x"),
            "compute s": lambda line: number(line.compute_s, ".4f"),
            "link s": lambda line: number(line.link_s or None, ".4f"),
            "vs floor": lambda line: number(line.to_floor, unit="x"),
            "bound by": lambda line: line.floor[1],
            "vs own products": lambda line: number(line.to_own, unit="x"),
            "GPU GiB (planned)": _reserved,
            "host GiB": lambda line: f"{line.record['host_bytes'] / GIB:.1f}",
            "losses": lambda line: {True: "equal", False: "DIFFER", None: ""}[line.same_losses],
        }
    ),
}


def gradient_columns(natives: list[Case]) -> Columns[Line]:
    """natives: the baselines of the table, each of which has a column."""

    def against(optimizer: str) -> Callable[[Line], str]:
        def cell(line: Line) -> str:
            like = (line.case.model, line.case.micro_batches)
            names = [c.name for c in natives if c.options["optimizer"] == optimizer]
            same = [c for c in natives if c.name in names and (c.model, c.micro_batches) == like]
            return number(line.against(same[0].name), unit="x") if same else ""

        return cell

    def own(line: Line) -> str:
        return number(line.record["own_products_s"], ".4f")

    def gpu(line: Line) -> str:
        device = line.record["device"]
        return f"{device['allocated_bytes'] / GIB:.2f} ({device['reserved_bytes'] / GIB:.2f})"

    def planned(line: Line) -> str:
        planned_bytes = line.record["planned_bytes"]
        return number(planned_bytes / GIB if planned_bytes else None)

    measured = {
        "s/step": lambda line: f"{line.step_s:.4f}",
        "+-": _spread,
        "tok/s": lambda line: f"{line.tok_s:,.0f}",
        **{f"vs {optimizer}": against(optimizer) for optimizer in {c.options["optimizer"]: 0 for c in natives}},
        "floor s": lambda line: number(line.floor[0], ".4f"),
        "vs floor": lambda line: number(line.to_floor, unit="x"),
        "bound by": lambda line: line.floor[1],
        "own products s": own,
        "vs own": lambda line: number(line.to_own, unit="x"),
        "GPU GiB (reserved)": gpu,
        "planned": planned,
        "weights GiB": lambda line: f"{line.record['weights_bytes'] / GIB:.2f}",
        "host GiB": lambda line: f"{line.record['host_bytes'] / GIB:.1f}",
    }
    return {"trial": lambda line: line.case.name, **_if_measured(measured)}


class StepReport(Report):
    """One line per case. kind: which columns and notes it has."""

    def __init__(self, name: str, out: Path, command: str, quick: bool, tables: dict[str, Table], kind: str) -> None:
        super().__init__(name, out, command, quick)
        self.tables, self.kind = tables, kind
        natives = [case for table in tables.values() for case in table.cases if case.system == NATIVE]
        self.columns = ZO_COLUMNS if kind == ZEROTH else gradient_columns(natives)

    def lines(self, table: Table) -> list[Line]:
        found = self.ok()
        return [Line(case, found.get(case.name, {}), found) for case in table.cases]

    def sections(self) -> list[str]:
        tables = [f"## {table.title}\n\n{table_of(self.columns, self.lines(table))}" for table in self.tables.values()]
        if self.kind == ZEROTH:
            return [ZO_NOTES, *tables, "## Link", self.links()]
        rate = max([0.0, *(r["product_rate"] or 0.0 for r in self.ok().values())])
        return [GRADIENT_NOTES.format(rate=rate / 1e12), *tables, *self.breakdown()]

    def links(self) -> str:
        rates = ("up", "down", "duplex", "duplex_median")
        links = [r for r in self.records if r["kind"] == "link"]
        rows = [[f"{r['unit_bytes'] / MIB:.0f}", *(f"{r[rate]:.1f}" for rate in rates)] for r in links]
        if not rows:
            return "Not measured (no GPU, or nothing was streamed)."
        return grid(["copy MiB", "up GB/s", "down GB/s", "both at once, each way", "median of that"], rows)

    def breakdown(self) -> list[str]:
        """Seconds of updates on the CPU, and how long launches waited for them."""
        rows = [
            [
                r["name"],
                f"{r['step_s']:.4f}",
                *(number(r["parts"].get(key), ".4f") for key in STEP_PARTS),
                *(f"{r[key] / GIB:.2f}" for key in ("bytes_up", "bytes_down")),
            ]
            for r in self.ok().values()
            if "host_wait_s" in r["parts"]
        ]
        return [PARTS_NOTE, grid(["trial", "step", *STEP_PARTS.values(), "GiB up", "GiB down"], rows)] if rows else []

    def differing(self) -> list[str]:
        """Cases whose losses differ from their reference."""
        lines = [line for table in self.tables.values() for line in self.lines(table) if line.record]
        return sorted({line.case.name for line in lines if line.same_losses is False})

    def line(self, found: Record) -> str:
        """The line on the terminal about a new record."""
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
