"""The result of a run: every record as JSON and the tables as Markdown, both rewritten after every record.

<bench>_<gpu>_<date>.json    command, commit, machine, all records
<bench>_<gpu>_<date>.md      the same as readable tables

A row of a table is a dict of its cells, by the heads of their columns.
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from keyhole.bench.cases import Table
from keyhole.disk.files import write_text, writing_to
from keyhole.disk.json_text import json_text
from keyhole.machine.text import markdown

Record = dict[str, Any]
Cells = dict[str, str]


class Report:
    """Collects records and keeps both files up to date, so that an interrupted run leaves its results. A benchmark
    defines the contents of the Markdown in `sections`, and the line on the terminal about a record."""

    def __init__(
        self, name: str, out: Path, command: str, quick: bool, tables: Mapping[str, Table] | None = None
    ) -> None:
        self.name, self.out, self.quick, self.tables = name, out, quick, tables or {}
        self.records: list[Record] = []
        self.machine: Record = {}
        self.started = datetime.now()
        self.about: Record = {"command": command, "commit": commit(), "quick": quick}
        self.about["date"] = self.started.isoformat(timespec="seconds")
        self.stem = ""

    def sections(self) -> list[str]:
        raise NotImplementedError  # abstract

    def line(self, found: Record) -> str:
        """On the terminal; "": none."""
        if found["kind"] != "case":
            return ""
        return f"{found['name']:<40} {found['status']}{': ' + found['error'][:300] if 'error' in found else ''}"

    def differing(self) -> list[str]:
        """Names of cases whose numbers differ where they must not."""
        return []

    def ok(self) -> Record:
        """The cases that were measured, by name; the latest if one ran again."""
        return {r["name"]: r for r in self.records if r["kind"] == "case" and r["status"] == "ok"}

    def add(self, record: Record) -> None:
        if record["kind"] == "machine":
            self.machine |= record
        else:
            self.records.append(record)
        found = self.about | {"machine": self.machine, "records": self.records}
        with writing_to(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            json_path, markdown_path = self.paths
            write_text(json_path, json_text(found, indent=1) + "\n")
            write_text(markdown_path, self.markdown())

    @property
    def paths(self) -> tuple[Path, Path]:
        """Paths of JSON and Markdown; named when the GPU is known, and never those of an earlier run."""
        if not self.stem:
            base = f"{self.name}_{self.gpu()}_{self.started:%Y-%m-%d}" + ("_quick" if self.quick else "")
            self.stem, count = base, 1
            while (self.out / f"{self.stem}.json").exists():
                count += 1
                self.stem = f"{base}_{count}"
        return self.out / f"{self.stem}.json", self.out / f"{self.stem}.md"

    def gpu(self) -> str:
        gpus = self.machine.get("gpus") or [{"name": "cpu"}]
        name = gpus[0]["name"] if self.machine.get("device") != "cpu" else "cpu"
        return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")

    def markdown(self) -> str:
        title = f"# keyhole bench {self.name}, {self.gpu()}, {self.started:%Y-%m-%d}"
        note = "**Quick run on tiny shapes: it shows that everything runs, its numbers mean nothing.**"
        bad = [r for r in self.records if r["kind"] == "case" and r["status"] != "ok"]
        failed = "\n".join(f"- {r['name']}: {r['status']}: {r['error']}" for r in bad)
        parts = [title, self.how(), note if self.quick else "", *self.sections(), failed]
        return "\n\n".join(filter(None, parts)) + "\n"

    def how(self) -> str:
        """How the results were made: GPU, versions, commit, command."""
        found = self.machine.get("versions", {})
        versions = [f"{k} {found[k]}" for k in ("python", "torch", "triton", "transformers") if found.get(k)]
        gpus = ", ".join(gpu["name"] for gpu in self.machine.get("gpus", [])) or "none"
        driver, tf32 = self.machine.get("cuda", {}).get("driver"), "on" if self.machine.get("tf32") else "off"
        lines = [
            f"GPU: {gpus}; driver {driver}; TF32: {tf32}",
            f"versions: {', '.join(versions)}",
            *(f"{key}: {self.about[key]}" for key in ("commit", "date")),
            f"reproduce: `{self.about['command']}`",
        ]
        return "\n".join(f"- {line}" for line in lines)


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """The rows as a table; a column that no row fills is left out."""
    heads = [head for head in dict.fromkeys(head for row in rows for head in row) if any(row.get(head) for row in rows)]
    return markdown(heads, [[row.get(head, "") for head in heads] for row in rows]) if heads else ""


def number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    """A cell; empty if the value is not known."""
    return "" if value is None else f"{value:{form}}{unit}"


def commit() -> str:
    """The current commit, marked if files differ from it; outside a repository KEYHOLE_COMMIT."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..")
        return git("rev-parse", "HEAD") + (" (with uncommitted changes)" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("KEYHOLE_COMMIT", "unknown")
