"""What `keyhole bench snapshots` says: a line a mode while it runs, and the Markdown of all of them.

Every mode is compared with the mode `none` of the same model; the target of snapshots in the background is TARGET of
its tokens a second. "half GiB" is half of the weights, the most that copies may take.
"""

import statistics
from typing import Any

GIB = 2**30
TARGET = 0.97


def one_line(row: dict[str, Any], none: dict[str, Any]) -> str:
    if row["mode"] == "replay":
        return f"{row['model']:>5} replay      {row['steps']} steps in {row['wall_s']:.2f} s"
    line = f"{row['model']:>5} {row['mode']:<11} {row['tokens_per_s']:10,.0f} tok/s, {ratio(row, none):.3f}x"
    if "write_s" in row:
        line += f"; written in {statistics.mean(row['write_s']):.2f} s"
    if "copies_bytes" in row:
        waited, more = sum(row["training_waited_s"]), (row["host_bytes"] - none["host_bytes"]) / GIB
        line += f"; training waited {waited:.2f} s; copies {row['copies_bytes'] / GIB:.2f} GiB, host {more:+.2f} GiB"
    return line


def ratio(row: dict[str, Any], none: dict[str, Any]) -> float:
    return row["tokens_per_s"] / none["tokens_per_s"]


def markdown(rows: list[dict[str, Any]], about: dict[str, Any], essay: str) -> str:
    """The table for people, under the essay of the benchmark without its title."""
    lines = [f"# keyhole bench snapshots, {about['date'][:10]}", f"commit {about['commit']}, device {about['device']}"]
    lines += [essay.strip().split("\n\n", 1)[1], ""]
    header = (
        "model|batch|mode|tok/s|against none|target|written in s|training waited s|copies GiB|half GiB|host GiB more"
    )
    table = ["| " + header.replace("|", " | ") + " |", "|" + "---|" * (header.count("|") + 1)]
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
    cells.append(", ".join(f"{s:.2f}" for s in row.get("training_waited_s", [])))
    cells.append(f"{row['copies_bytes'] / GIB:.2f}" if background else "")
    cells.append(f"{row['weights_bytes'] / 2 / GIB:.2f}" if background else "")
    cells.append(f"{(row['host_bytes'] - none['host_bytes']) / GIB:+.2f}" if background else "")
    return cells
