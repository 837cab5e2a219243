"""The result of a run: every record as JSON, and the tables as Markdown, written anew after every case.

zo_<gpu>_<date>.json    command, commit, machine, all records
zo_<gpu>_<date>.md      the same for people: targets with verdicts, then a table for each that was asked for
"""

import json
import os
import re
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

from keyhole.bench.cases import TABLES, Case
from keyhole.bench.floors import Line, Record, lines_of
from keyhole.bench.judged import judge
from keyhole.disk.files import write_text
from keyhole.machine.sizes import GIB

TITLES = {
    "judged": "All cases with a target",
    "sizes": "Model sizes",
    "ablation": "Ablation: each part switched off",
    "wire": "Formats on the link",
    "batches": "Batch sizes",
    "compiled": "Compiled blocks",
    "lengths": "Sequence lengths",
    "budgets": "GPU memory budgets",
    "giant": "The 175B shape",
}
NOTES = """\
tok/s and ratios are medians over the timed steps; +- is (max - min) / 2 over the median. "vs textbook" is
tok/s over the in-memory MeZO loop's. "compute" is the resident zo step, "link" the bytes that cross over
the rates measured in the same process: each way alone, and what goes both ways at the duplex rate. "vs
floor" is the step over the larger of the two. "26 % down": so much of what came up was written back. GPU GiB is
the peak that the allocator reserved, with the planned peak in brackets; host GiB the peak resident set of
the process. "blocks" says how many ran where that is not all: times of such a row are those of the blocks
that ran, not scaled. "losses" compares, bit for bit and from the same weights, streamed with resident,
and a run with parts switched off with the streamed one."""
HEADER = (
    "model|dtype|blocks|batch|length|system|setting|s/step|+-|tok/s|vs textbook|compute s|link s|vs floor|"
    "bound by|GPU GiB (planned)|host GiB|losses"
).split("|")


class Report:
    """Collects records and keeps both files up to date."""

    def __init__(self, out: Path, tables: list[str], cases: list[Case], command: str, quick: bool) -> None:
        self.out, self.tables, self.quick = out, tables, quick
        self.chosen = {case.name for case in cases}
        self.records: list[Record] = []
        self.about: dict[str, Any] = {"command": command, "commit": commit(), "quick": quick}
        self.started = datetime.now()
        self.about["date"] = self.started.isoformat(timespec="seconds")
        self.stem: str | None = None

    def add(self, record: Record) -> None:
        if record["kind"] == "machine":
            self.about.setdefault("machine", record)
        elif record["kind"] in ("case", "link"):
            self.records.append(record)
        self.save()

    @property
    def paths(self) -> tuple[Path, Path]:
        """JSON and Markdown; named when the GPU is known, and never the files of an earlier run."""
        if self.stem is None:
            base = f"zo_{self.gpu()}_{self.started:%Y-%m-%d}" + ("_quick" if self.quick else "")
            count = 1
            while (self.out / f"{_numbered(base, count)}.json").exists():
                count += 1
            self.stem = _numbered(base, count)
        return self.out / f"{self.stem}.json", self.out / f"{self.stem}.md"

    def gpu(self) -> str:
        gpus = self.about.get("machine", {}).get("gpus") or [{"name": "cpu"}]
        name = gpus[0]["name"] if self.about.get("machine", {}).get("device") != "cpu" else "cpu"
        return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        json_path, markdown_path = self.paths
        write_text(json_path, json.dumps({**self.about, "records": self.records}, indent=1) + "\n")
        write_text(markdown_path, self.markdown())

    def markdown(self) -> str:
        parts = [f"# keyhole bench zo, {self.gpu()}, {self.started:%Y-%m-%d}", self.how(), NOTES]
        if self.quick:
            parts.append(
                "**Quick run on tiny shapes: it shows that everything runs, its numbers mean nothing.**"
            )
        if "judged" in self.tables:
            parts.append("## Targets\n\n" + self.targets())
        for table in self.tables:
            parts.append(f"## {TITLES[table]}\n\n" + self.table(table))
        parts.append("## Link\n\n" + self.links())
        return "\n\n".join(parts) + "\n"

    def summary(self) -> str:
        """For the terminal: the targets if they were asked for, else the tables, and where the files are."""
        parts = [self.targets()] if "judged" in self.tables else []
        parts += [self.table(table) for table in self.tables if table != "judged"]
        return "\n\n".join([*parts, "wrote " + " and ".join(map(str, self.paths))])

    def differing(self) -> list[str]:
        """Cases whose losses are not those they must be."""
        lines = [line for table in self.tables for line in self.lines(table)]
        return sorted({line.case.name for line in lines if line.same_losses is False})

    def how(self) -> str:
        machine = self.about.get("machine", {})
        found = machine.get("versions", {})
        versions = ", ".join(
            f"{k} {found[k]}" for k in ("python", "torch", "triton", "transformers") if found.get(k)
        )
        gpus = ", ".join(gpu["name"] for gpu in machine.get("gpus", [])) or "none"
        driver = machine.get("cuda", {}).get("driver")
        return "\n".join(
            [
                f"- GPU: {gpus}; driver {driver}; TF32: {'on' if machine.get('tf32') else 'off'}",
                f"- versions: {versions}",
                f"- commit: {self.about['commit']}",
                f"- date: {self.about['date']}",
                f"- reproduce: `{self.about['command']}`",
            ]
        )

    def targets(self) -> str:
        chosen = [row for row in judge(self.records) if row.case in self.chosen or "*" in row.case]
        rows = [[r.what, r.case, r.target, r.measured, "" if self.quick else r.verdict] for r in chosen]
        return grid(["what", "case", "target", "measured", "verdict"], rows)

    def lines(self, table: str) -> list[Line]:
        return lines_of([case for case in TABLES[table]() if case.name in self.chosen], self.records)

    def table(self, name: str) -> str:
        return table_of(self.lines(name))

    def links(self) -> str:
        rows = [
            [
                f"{r['unit_bytes'] / 2**20:.0f}",
                *(f"{r[k]:.1f}" for k in ("up", "down", "duplex", "duplex_median")),
            ]
            for r in self.records
            if r["kind"] == "link"
        ]
        if not rows:
            return "Not measured (no GPU, or nothing was streamed)."
        return grid(["copy MiB", "up GB/s", "down GB/s", "both at once, each way", "median of that"], rows)


def grid(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns also line up as plain text."""
    rows = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in lines
    )


def table_of(lines: list[Line]) -> str:
    failed = [
        f"- {line.case.name}: {line.record['status']}: {line.record.get('error', '')}"
        for line in lines
        if not line.ok
    ]
    return "\n\n".join(
        part for part in (grid(HEADER, [cells(line) for line in lines]), "\n".join(failed)) if part
    )


def cells(line: Line) -> list[str]:
    """The cells of one line; what is not known is empty."""
    case, found = line.case, line.record
    settings = [case.gpu_memory, *[f"no {switch}" for switch in case.switched_off], case.wire]
    settings += ["compiled"] if case.compiled else []
    up, down = found.get("bytes_up", 0), found.get("bytes_down", 0)
    settings += [f"{down / up:.0%} down"] if case.deferred_update and down < 0.9 * up else []
    setting = ", ".join(filter(None, settings))
    start = [
        case.model,
        case.dtype,
        str(case.blocks or "all"),
        str(case.batch),
        str(case.length),
        case.system,
        setting,
    ]
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


def _numbered(base: str, count: int) -> str:
    return base if count == 1 else f"{base}_{count}"


def commit() -> str:
    """The commit that ran, marked if files differ from it; KEYHOLE_COMMIT names it outside a repository."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..")
        return git("rev-parse", "HEAD") + (" (with uncommitted changes)" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("KEYHOLE_COMMIT", "unknown")
