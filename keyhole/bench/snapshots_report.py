"""What `keyhole bench snapshots` says: a line a mode while it runs, and the Markdown of all of them.

Every mode is compared with the mode `none` of the same model; the target of snapshots in the background is TARGET of
its tokens a second. "half GiB" is half of the weights, the most that copies may take.
"""

import statistics
from typing import Any

from keyhole.machine.sizes import GIB

TARGET = 0.97


COLUMNS = (
    "model batch mode tok/s against_none target written_in_s disk's_floor_s period_s vs_floor training_waited_s "
    "copies_GiB half_GiB host_GiB_more"
).split()


def one_line(row: dict[str, Any], none: dict[str, Any]) -> str:
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


def ratio(row: dict[str, Any], none: dict[str, Any]) -> float:
    return row["tokens_per_s"] / none["tokens_per_s"]


def disk_s(row: dict[str, Any]) -> float:
    """What the disk alone needs for the weights."""
    return row["weights_bytes"] / row["disk_bytes_per_s"]


def period_s(row: dict[str, Any], none: dict[str, Any]) -> float:
    """Of as many steps as lie between two checkpoints; `none` is timed over one period."""
    return row["wall_s"] / row["steps"] * none["steps"]


def distance(row: dict[str, Any], none: dict[str, Any]) -> float:
    """A period with a checkpoint over its floor: the steps, or the disk."""
    return period_s(row, none) / max(period_s(none, none), disk_s(row))


def markdown(rows: list[dict[str, Any]], about: dict[str, Any], essay: str) -> str:
    """The table for people, under the essay of the benchmark without its title."""
    lines = [f"# keyhole bench snapshots, {about['date'][:10]}", f"commit {about['commit']}, device {about['device']}"]
    lines += [essay.strip().split("\n\n", 1)[1], ""]
    header = [column.replace("_", " ") for column in COLUMNS]
    table = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        none = next(r for r in rows if r["model"] == row["model"] and r["mode"] == "none")
        if row["mode"] != "replay":
            table.append("| " + " | ".join(_cells(row, none)) + " |")
    replayed = [one_line(row, row).strip() for row in rows if row["mode"] == "replay"]
    return "\n\n".join([*lines, "\n".join(table), *replayed]) + "\n"


def _cells(row: dict[str, Any], none: dict[str, Any]) -> list[str]:
    background = row["mode"] == "background"
    met = "" if not background else f">= {TARGET}: {'met' if ratio(row, none) >= TARGET else 'NOT met'}"
    cells = [
        row["model"],
        str(row["batch"]),
        row["mode"],
        f"{row['tokens_per_s']:,.0f}",
        f"{ratio(row, none):.3f}x",
        met,
    ]
    cells.append(", ".join(f"{s:.2f}" for s in row.get("write_s", [])))
    cells.append(f"{disk_s(row):.2f}" if background else "")
    cells.append(f"{period_s(row, none):.2f}")
    cells.append(f"{distance(row, none):.2f}x" if background else "")
    cells.append(", ".join(f"{s:.2f}" for s in row.get("training_waited_s", [])))
    cells.append(f"{row['copies_bytes'] / GIB:.2f}" if background else "")
    cells.append(f"{row['weights_bytes'] / 2 / GIB:.2f}" if background else "")
    cells.append(f"{(row['host_bytes'] - none['host_bytes']) / GIB:+.2f}" if background else "")
    return cells
