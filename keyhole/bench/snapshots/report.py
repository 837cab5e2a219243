"""The report of `keyhole bench snapshots`: one line per mode during the run, and a table of all modes.

Every mode is compared with the same steps without checkpoints: streamed ones with `none`, MeZO's loop in memory with
`textbook`; and with `textbook` itself, the paper's unit. "half GiB" is half of the weights, the limit for copies.
"""

import statistics
from pathlib import Path

from keyhole.bench.report import Record, Report, grid
from keyhole.machine.sizes import GIB

NONE, TEXTBOOK = "none", "textbook"
HEADER = (
    "model|batch|mode|tok/s|against none|against textbook|written in s|disk's floor s|period s|vs floor|"
    "training waited s|copies GiB|half GiB|host GiB more|GPU GiB"
).split("|")


class SnapshotReport(Report):
    """essay: what the modes mean, for the page."""

    def __init__(self, out: Path, command: str, quick: bool, essay: str) -> None:
        super().__init__("snapshots", out, command, quick)
        self.essay = essay.strip().split("\n\n", 1)[1]

    def sections(self) -> list[str]:
        rows = [cells(row, self.records) for row in self.records if row["mode"] != "replay"]
        replays = [one_line(row, self.records).strip() for row in self.records if row["mode"] == "replay"]
        return [self.essay, grid(HEADER, rows), *replays]


def mode_of(model: str, mode: str, rows: list[Record]) -> Record | None:
    return next((r for r in rows if (r["model"], r["mode"]) == (model, mode)), None)


def none_of(row: Record, rows: list[Record]) -> Record:
    """The row of the same model and loop without checkpoints."""
    found = mode_of(row["model"], TEXTBOOK if row["mode"].startswith(TEXTBOOK) else NONE, rows)
    assert found is not None, "timed before every other mode"
    return found


def one_line(row: Record, rows: list[Record]) -> str:
    """For the terminal."""
    if row["mode"] == "replay":
        return f"{row['model']:>5} replay      {row['steps']} steps in {row['wall_s']:.2f} s"
    none = none_of(row, rows)
    line = f"{row['model']:>5} {row['mode']:<19} {row['tokens_per_s']:10,.0f} tok/s, {ratio(row, none):.3f}x"
    if "write_s" in row:
        line += f"; written in {statistics.mean(row['write_s']):.2f} s"
        line += f" (the disk alone: {disk_s(row):.2f} s; {none['steps']} steps alone: {none['wall_s']:.2f} s)"
        line += f"; {distance(row, none):.2f}x of the floor"
    if "copies_bytes" in row:
        waited, more = sum(row["training_waited_s"]), (row["host_bytes"] - none["host_bytes"]) / GIB
        line += f"; training waited {waited:.2f} s; copies {row['copies_bytes'] / GIB:.2f} GiB, host {more:+.2f} GiB"
    return line


def ratio(row: Record, none: Record) -> float:
    return float(row["tokens_per_s"] / none["tokens_per_s"])


def disk_s(row: Record) -> float:
    """Seconds that the disk alone needs for the weights."""
    return float(row["weights_bytes"] / row["disk_bytes_per_s"])


def period_s(row: Record, none: Record) -> float:
    """Seconds of the steps between two checkpoints; `none` is timed over one period."""
    return float(row["wall_s"] / row["steps"] * none["steps"])


def distance(row: Record, none: Record) -> float:
    """The time of a period with a checkpoint over its floor: the longer of steps and disk."""
    return period_s(row, none) / max(period_s(none, none), disk_s(row))


def cells(row: Record, rows: list[Record]) -> list[str]:
    """The cells of one line; missing values are empty."""
    none, textbook = none_of(row, rows), mode_of(row["model"], TEXTBOOK, rows)
    saves, copies = "write_s" in row, "copies_bytes" in row
    device = row.get("device", {}).get("reserved_bytes")
    return [
        row["model"],
        str(row["batch"]),
        row["mode"],
        f"{row['tokens_per_s']:,.0f}",
        f"{ratio(row, none):.3f}x",
        f"{ratio(row, textbook):.3f}x" if textbook else "",
        ", ".join(f"{s:.2f}" for s in row.get("write_s", [])),
        f"{disk_s(row):.2f}" if saves else "",
        f"{period_s(row, none):.2f}",
        f"{distance(row, none):.2f}x" if saves else "",
        ", ".join(f"{s:.2f}" for s in row.get("training_waited_s", [])),
        f"{row['copies_bytes'] / GIB:.2f}" if copies else "",
        f"{row['weights_bytes'] / 2 / GIB:.2f}" if copies else "",
        f"{(row['host_bytes'] - none['host_bytes']) / GIB:+.2f}" if copies else "",
        f"{device / GIB:.2f}" if device else "",
    ]
