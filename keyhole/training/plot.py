"""run/loss.png: the loss per step, its running mean, and the evaluations; beside them the metrics of the tasks, if any.

A zeroth-order loss is noisy, so single steps are drawn faintly and the mean over the last 2 % of the run (at least
five steps) as a full line. If there are many tasks, their names are in columns right of the plot, and the picture is
wider. matplotlib is imported only here, without a window.
"""

import importlib.util
from itertools import accumulate
from pathlib import Path

from keyhole.disk.files import replacing
from keyhole.machine.text import printable
from keyhole.report.entries import Entry, read_metrics

MOST_INSIDE, NAMES_PER_COLUMN = 12, 20
COLUMN_WIDTH, MOST_NAME = 3.2, 40  # inches, characters


def running_mean(values: list[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place (fewer at the start)."""
    sums = list(accumulate(values, initial=0.0))
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]


def task_curves(entries: list[Entry]) -> dict[str, list[tuple[int, float]]]:
    """`dev accuracy`, `test accuracy`, ... -> points (step, value), from the entries of a metrics file."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for entry in entries:
        for key, value in entry.items():
            split, _, name = key.partition("_")
            if split in ("eval", "test") and name not in ("loss", "tokens", "rows", "questions") and value is not None:
                curves.setdefault(f"{'dev' if split == 'eval' else split} {name}", []).append((entry["step"], value))
    return curves


def plot_loss(metrics: Path, picture: Path, title: str, by_candidates: bool = False) -> bool:
    """Draws the picture from the metrics file, atomically; False without steps, or without matplotlib. by_candidates:
    the loss of training is per question, so that of evaluations, per token, gets an axis of its own."""
    entries = read_metrics(metrics)
    steps = [(entry["step"], entry["loss"]) for entry in entries if entry.get("loss") is not None]
    evals = [(entry["step"], entry["eval_loss"]) for entry in entries if entry.get("eval_loss") is not None]
    if not steps or importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = task_curves(entries)
    columns = -(-len(curves) // NAMES_PER_COLUMN) if len(curves) > MOST_INSIDE else 0
    panels = 2 if curves else 1
    figure = Figure(figsize=(8 * panels + COLUMN_WIDTH * columns, 4.5), dpi=120, layout="constrained")
    axes, *others = figure.subplots(1, panels, squeeze=False)[0]
    (x, y), window = zip(*steps, strict=True), max(5, len(steps) // 50)
    axes.plot(x, y, color="tab:blue", alpha=0.25, linewidth=1)
    lines = axes.plot(x, running_mean(list(y), window), color="tab:blue", label=f"train (mean of {window} steps)")
    per_row = any("eval_rows" in entry for entry in entries)  # a classifier's
    unit = "over candidates (nats per question)" if by_candidates else "per row" if per_row else "(nats per token)"
    axes.set(xlabel="step", ylabel=f"loss {unit}", title=title)
    axes.grid(alpha=0.3)
    if evals:
        beside = axes.twinx() if by_candidates else axes
        lines += beside.plot(*zip(*evals, strict=True), color="tab:orange", marker="o", label="eval")
        beside.set_ylabel("loss (nats per token)" if by_candidates else axes.get_ylabel())
    axes.legend(handles=lines)
    for beside in others:
        for name, points in curves.items():
            style = {"marker": "*", "markersize": 12, "linestyle": ""} if name.startswith("test") else {"marker": "o"}
            beside.plot(*zip(*points, strict=True), label=printable(name, MOST_NAME), **style)
        beside.set(xlabel="step", title="metrics of the tasks")
        beside.grid(alpha=0.3)
        outside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "ncols": columns, "fontsize": "small"}
        beside.legend(**outside if columns else {})
    with replacing(picture) as file:
        FigureCanvasAgg(figure).print_png(file)
    return True
