"""What `keyhole bench snapshots` says: one line per mode while it runs, and a table of all of them.

Every mode is compared with the mode `none` of the same model. "half GiB" is half of the weights, the most that copies
may take.
"""

import statistics
from pathlib import Path

from keyhole.bench.report import Record, Report, grid
from keyhole.machine.sizes import GIB

HEADER = (
    "model|batch|mode|tok/s|against none|written in s|disk's floor s|period s|vs floor|training waited s|copies GiB|"
    "half GiB|host GiB more"
).split("|")


class SnapshotReport(Report):
    """essay: what the modes mean, for the page."""

    def __init__(self, out: Path, command: str, quick: bool, essay: str) -> None:
        super().__init__("snapshots", out, command, quick)
        self.essay = essay.strip().split("\n\n", 1)[1]

    def sections(self) -> list[str]:
        rows = [cells(row, none_of(row, self.records)) for row in self.records if row["mode"] != "replay"]
        replays = [one_line(row, row).strip() for row in self.records if row["mode"] == "replay"]
        return [self.essay, grid(HEADER, rows), *replays]


def none_of(row: Record, rows: list[Record]) -> Record:
    """The row of the same model without checkpoints."""
    return next(r for r in rows if (r["model"], r["mode"]) == (row["model"], "none"))


def one_line(row: Record, none: Record) -> str:
    """For the terminal."""
    if row["mode"] == "replay":
        return f"{row['model']:>5} replay      {row['steps']} steps in {row['wall_s']:.2f} s"
    line = f"{row['model']:>5} {row['mode']:<11} {row['tokens_per_s']:10,.0f} tok/s, {ratio(row, none):.3f}x"
    if "write_s" in row:
        line += f"; written in {statistics.mean(row['write_s']):.2f} s"
    if "copies_bytes" in row:
        waited, more = sum(row["training_waited_s"]), (row["host_bytes"] - none["host_bytes"]) / GIB
        line += f" (the disk alone: {disk_s(row):.2f} s; {none['steps']} steps alone: {none['wall_s']:.2f} s)"
        line += f"; {distance(row, none):.2f}x of the floor; training waited {waited:.2f} s"
        line += f"; copies {row['copies_bytes'] / GIB:.2f} GiB, host {more:+.2f} GiB"
    return line


def ratio(row: Record, none: Record) -> float:
    return row["tokens_per_s"] / none["tokens_per_s"]


def disk_s(row: Record) -> float:
    """What the disk alone needs for the weights."""
    return row["weights_bytes"] / row["disk_bytes_per_s"]


def period_s(row: Record, none: Record) -> float:
    """Of as many steps as lie between two checkpoints; `none` is timed over one period."""
    return row["wall_s"] / row["steps"] * none["steps"]


def distance(row: Record, none: Record) -> float:
    """A period with a checkpoint over its floor: the steps, or the disk."""
    return period_s(row, none) / max(period_s(none, none), disk_s(row))


def cells(row: Record, none: Record) -> list[str]:
    """The cells of one line; what a mode does not have is empty."""
    start = [row["model"], str(row["batch"]), row["mode"], f"{row['tokens_per_s']:,.0f}", f"{ratio(row, none):.3f}x"]
    written = ", ".join(f"{s:.2f}" for s in row.get("write_s", []))
    if "copies_bytes" not in row:
        return [*start, written, "", f"{period_s(row, none):.2f}", *[""] * 5]
    return [
        *start,
        written,
        f"{disk_s(row):.2f}",
        f"{period_s(row, none):.2f}",
        f"{distance(row, none):.2f}x",
        ", ".join(f"{s:.2f}" for s in row["training_waited_s"]),
        f"{row['copies_bytes'] / GIB:.2f}",
        f"{row['weights_bytes'] / 2 / GIB:.2f}",
        f"{(row['host_bytes'] - none['host_bytes']) / GIB:+.2f}",
    ]
