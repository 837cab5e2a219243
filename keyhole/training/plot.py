"""run/loss.png: the loss per step, its running mean, and the evaluations.

A zeroth-order loss is noisy, so the single steps are drawn faint and the mean over the last 2 % of the run
(at least five steps) in full. matplotlib is imported here only, without a window.
"""

import importlib.util
from pathlib import Path

from keyhole.disk.files import replacing
from keyhole.training.metrics import read_metrics


def running_mean(values: list[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place (fewer at the start)."""
    means, total = [], 0.0
    for i, value in enumerate(values):
        total += value
        if i >= window:
            total -= values[i - window]
        means.append(total / min(i + 1, window))
    return means


def plot_loss(metrics: Path, picture: Path, title: str) -> bool:
    """Draws the picture from the metrics file, atomically; False without steps, or without matplotlib."""
    entries = read_metrics(metrics)
    steps = [(entry["step"], entry["loss"]) for entry in entries if entry.get("loss") is not None]
    evals = [(entry["step"], entry["eval_loss"]) for entry in entries if entry.get("eval_loss") is not None]
    if not steps or importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    x, y = zip(*steps, strict=True)
    window = max(5, len(steps) // 50)
    axes.plot(x, y, color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(x, running_mean(list(y), window), color="tab:blue", label=f"train (mean of {window} steps)")
    if evals:
        axes.plot(*zip(*evals, strict=True), color="tab:orange", marker="o", label="eval")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(picture) as file:
        FigureCanvasAgg(figure).print_png(file)
    return True
