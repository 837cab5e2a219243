"""The tables of `keyhole bench zo`: one line per case, with its floor."""

from pathlib import Path

from keyhole.bench.report import Record, Report, grid
from keyhole.bench.shapes import MODELS
from keyhole.bench.zo.cases import Table
from keyhole.bench.zo.floors import Line, cases_of, line_of
from keyhole.machine.sizes import GIB, MIB
from keyhole.methods.zo.traits import ZO

NOTES = """\
tok/s and ratios are medians over the timed steps; +- is (max - min) / 2 over the median. "vs textbook" is tok/s over
the in-memory MeZO loop's. "compute" is the resident zo step, "link" the bytes that cross over the rates measured in the
same process: each way alone, and what goes both ways at the duplex rate. "vs floor": the step over the larger of both.
"26 % down": so much of what came up was written back. GPU GiB is the peak that the allocator reserved, with the planned
peak in brackets; host GiB the peak resident set of the process. "blocks" says how many ran where that is not all: times
of such a row are those of the blocks that ran, not scaled. The textbook loop's memory is its own: what keyhole keeps of
the model is given back before. "losses" compares, bit for bit and from the same weights, streamed with resident, and a
run with parts switched off with the streamed one."""
HEADER = (
    "model|dtype|blocks|batch|length|system|setting|s/step|+-|tok/s|vs textbook|compute s|link s|vs floor|"
    "bound by|GPU GiB (planned)|host GiB|losses"
).split("|")


class ZoReport(Report):
    """tables: the requested ones, by name."""

    def __init__(self, out: Path, tables: dict[str, Table], command: str, quick: bool) -> None:
        super().__init__(ZO.name, out, command, quick)
        self.tables = tables

    def sections(self) -> list[str]:
        tables = [f"## {table.title}\n\n{self.table(table)}" for table in self.tables.values()]
        return [NOTES, *tables, "## Link\n\n" + self.links()]

    def summary(self) -> str:
        """For the terminal: the tables, and the paths of the files."""
        tables = [self.table(table) for table in self.tables.values()]
        return "\n\n".join([*tables, "wrote " + " and ".join(map(str, self.paths))])

    def lines(self, table: Table) -> list[Line]:
        found = cases_of(self.records)
        return [line_of(case, found) for case in table.cases]

    def differing(self) -> list[str]:
        """Cases whose losses differ from their reference."""
        lines = [line for table in self.tables.values() for line in self.lines(table)]
        return sorted({line.case.name for line in lines if line.same_losses is False})

    def table(self, table: Table) -> str:
        lines = self.lines(table)
        failed = [f"- {x.case.name}: {x.record['status']}: {x.record.get('error', '')}" for x in lines if not x.ok]
        return "\n\n".join(part for part in (grid(HEADER, [cells(line) for line in lines]), "\n".join(failed)) if part)

    def links(self) -> str:
        rates = ("up", "down", "duplex", "duplex_median")
        links = [r for r in self.records if r["kind"] == "link"]
        rows = [[f"{r['unit_bytes'] / MIB:.0f}", *(f"{r[rate]:.1f}" for rate in rates)] for r in links]
        if not rows:
            return "Not measured (no GPU, or nothing was streamed)."
        return grid(["copy MiB", "up GB/s", "down GB/s", "both at once, each way", "median of that"], rows)


def cells(line: Line) -> list[str]:
    """The cells of one line; unknown values are empty."""
    case, found = line.case, line.record
    settings = [case.gpu_memory, *[f"no {switch}" for switch in case.switched_off], case.wire]
    settings += ["compiled"] if case.compiled else []
    up, down = found.get("bytes_up", 0), found.get("bytes_down", 0)
    settings += [f"{down / up:.0%} down"] if case.deferred_update and down < 0.9 * up else []
    blocks = f"{case.blocks} of {MODELS[case.model][1]}" if case.blocks else "all"
    start = [case.model, case.dtype, blocks, str(case.batch), str(case.length), case.system]
    start.append(", ".join(filter(None, settings)))
    if not line.ok:
        return [*start, found["status"], *[""] * (len(HEADER) - len(start) - 1)]
    planned = found["planned_bytes"]
    return [
        *start,
        f"{found['step_s']:.4f}",
        f"{50 * (found['max_s'] - found['min_s']) / found['step_s']:.1f} %",
        f"{line.tok_s:,.0f}",
        _number(line.to_textbook, "x"),
        _number(line.compute_s, digits=4),
        _number(line.link_s, digits=4),
        _number(line.to_floor, "x"),
        line.bound,
        f"{found['device']['reserved_bytes'] / GIB:.2f}" + (f" ({planned / GIB:.2f})" if planned else ""),
        f"{found['host_bytes'] / GIB:.1f}",
        {True: "equal", False: "DIFFER", None: ""}[line.same_losses],
    ]


def _number(value: float | None, unit: str = "", digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def one_line(found: Record) -> str:
    """The line on the terminal about a new record."""
    if found["kind"] == "link":
        rates = ", ".join(f"{name} {found[name]:.1f}" for name in ("up", "down", "duplex"))
        return f"link, copies of {found['unit_bytes'] / MIB:.0f} MiB: {rates} GB/s"
    if found["kind"] != "case":
        return ""
    if found["status"] != "ok":
        return f"{found['name']:<40} {found['status']}: {found['error'][:300]}"
    reserved_gib, host_gib = found["device"]["reserved_bytes"] / GIB, found["host_bytes"] / GIB
    return (
        f"{found['name']:<40} {found['step_s']:.4f} s/step ({found['min_s']:.4f}-{found['max_s']:.4f}, wall "
        f"{found['wall_s']:.4f}), GPU {reserved_gib:.2f} GiB, host {host_gib:.1f} GiB, "
        f"loss {found['losses'][-1]:.4f}, loaded in {found['load_s']:.1f} s"
    )
