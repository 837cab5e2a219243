"""The result of a run: every record as JSON and the tables as Markdown, both rewritten after every record.

<bench>_<gpu>_<date>.json    command, commit, machine, all records
<bench>_<gpu>_<date>.md      the same as readable tables
"""

import os
import re
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

from keyhole.disk.files import write_text
from keyhole.disk.json_text import json_text

Record = dict[str, Any]


class Report:
    """Collects records and keeps both files up to date, so that an interrupted run leaves its results. A benchmark
    defines the contents of the Markdown in `sections`."""

    def __init__(self, name: str, out: Path, command: str, quick: bool) -> None:
        self.name, self.out, self.quick = name, out, quick
        self.records: list[Record] = []
        self.started = datetime.now()
        self.about: dict[str, Any] = {"command": command, "commit": commit(), "quick": quick}
        self.about["date"] = self.started.isoformat(timespec="seconds")
        self.stem: str | None = None

    def sections(self) -> list[str]:
        raise NotImplementedError  # abstract

    def add(self, record: Record) -> None:
        if record["kind"] == "machine":
            self.about["machine"] = self.about.get("machine", {}) | record
        elif record["kind"] != "begin":
            self.records.append(record)
        self.save()

    @property
    def machine(self) -> dict[str, Any]:
        return dict(self.about.get("machine", {}))

    @property
    def paths(self) -> tuple[Path, Path]:
        """Paths of JSON and Markdown; named when the GPU is known, and never those of an earlier run."""
        if self.stem is None:
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

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        json_path, markdown_path = self.paths
        write_text(json_path, json_text({**self.about, "records": self.records}, indent=1) + "\n")
        write_text(markdown_path, self.markdown())

    def markdown(self) -> str:
        title = f"# keyhole bench {self.name}, {self.gpu()}, {self.started:%Y-%m-%d}"
        note = ["**Quick run on tiny shapes: it shows that everything runs, its numbers mean nothing.**"]
        return "\n\n".join([title, self.how(), *(note if self.quick else []), *self.sections()]) + "\n"

    def how(self) -> str:
        """How the results were made: GPU, versions, commit, command."""
        found = self.machine.get("versions", {})
        versions = [f"{k} {found[k]}" for k in ("python", "torch", "triton", "transformers") if found.get(k)]
        gpus = ", ".join(gpu["name"] for gpu in self.machine.get("gpus", [])) or "none"
        driver, tf32 = self.machine.get("cuda", {}).get("driver"), "on" if self.machine.get("tf32") else "off"
        lines = [f"GPU: {gpus}; driver {driver}; TF32: {tf32}", f"versions: {', '.join(versions)}"]
        lines += [f"{key}: {self.about[key]}" for key in ("commit", "date")]
        return "\n".join(f"- {line}" for line in [*lines, f"reproduce: `{self.about['command']}`"])


def grid(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns are also aligned as plain text."""
    rows = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in lines)


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
