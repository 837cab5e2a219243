"""The table of a comparison: the best settings of each method by dev, then their test, mean and spread over seeds.

    chosen    the point of the grid with the best dev metric: of the first seed, or in the mean over all seeds
              (choose_by); of equal ones the first in the file. Failed runs are not considered
    mean      of test over the seeds of that point           spread    its standard deviation (n - 1); none for one seed

A mean over fewer seeds than were asked for is marked: `88.4 (1 of 3 seeds)`. The column `mean` is over the tasks: of
metrics in percent, named in its heading if they differ, as GLUE's is. Where a task has a perplexity or a loss, there is
no such column.
Test questions are never used to choose.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from keyhole.compare.file import CHOOSE_BY, ZERO_SHOT, Comparison
from keyhole.compare.plan import Group, Point
from keyhole.compare.result import Result, lower_is_better
from keyhole.disk.json_text import json_text
from keyhole.eval.metrics import as_published
from keyhole.machine.text import printable

Results = Mapping[str, Result]  # by id


@dataclass
class Cell:
    model: str
    task: str
    method: str
    chosen: Point | None = None
    metric: str | None = None
    mean: float | None = None
    spread: float | None = None
    dev_metric: str | None = None
    dev_mean: float | None = None
    seconds: float | None = None
    gpu_gib: float | None = None
    runs: list[Result] = field(default_factory=list)  # of the chosen point, one per seed
    grid: list[Result] = field(default_factory=list)  # all runs
    missing: int = 0  # runs of the grid that are not done
    seeds: int = 1  # number requested

    @property
    def errors(self) -> list[str]:
        return list(dict.fromkeys(result.error for result in [*self.grid, *self.runs] if result.error))

    @property
    def partial(self) -> str:
        """`1 of 3 seeds`, if the mean is not over all seeds; "" otherwise."""
        have = sum(result.test is not None for result in self.runs if not result.error)
        return f"{have} of {self.seeds} seeds" if self.mean is not None and have < self.seeds else ""


def seeds_of_grid(comparison: Comparison) -> list[int]:
    return comparison.seeds[:1] if comparison.choose_by == CHOOSE_BY[0] else comparison.seeds


def choose(group: Group, asked: Sequence[int], results: Results) -> Point | None:
    """The point with the best dev metric with these seeds, of equal ones the first; None if no run succeeded."""
    scored = []
    for point in group.points:
        found = [results.get(group.trials[point, seed].id) for seed in asked]
        good = [result for result in found if result is not None and not result.error]
        devs = [result.dev for result in good if result.dev is not None and math.isfinite(result.dev)]
        if good and len(group.points) == 1:  # nothing to choose: dev may be missing
            return point
        if len(devs) == len(asked):
            greater = group.trials[point, asked[0]].config.greater_is_better
            greater = not lower_is_better(good[0].dev_metric) if greater is None else greater
            scored.append((statistics.fmean(devs) * (-1 if greater else 1), point))
    return min(scored, key=lambda one: one[0])[1] if scored else None


def cell_of(group: Group, comparison: Comparison, results: Results) -> Cell:
    seeds, asked = comparison.seeds, seeds_of_grid(comparison)
    cell = Cell(group.model, group.task, group.method, choose(group, asked, results), seeds=len(seeds))
    cell.grid = [results[trial.id] for trial in group.trials.values() if trial.id in results]
    cell.missing = sum(group.trials[point, seed].id not in results for point in group.points for seed in asked)
    if cell.chosen is None:
        return cell
    done = [results.get(group.trials[cell.chosen, seed].id) for seed in seeds]
    cell.missing += sum(result is None for result in done[len(asked) :])
    cell.runs = [result for result in done if result is not None]
    return _filled(cell)


def _filled(cell: Cell) -> Cell:
    good = [result for result in cell.runs if not result.error]
    tests = [result.test for result in good if result.test is not None]
    devs = [result.dev for result in good if result.dev is not None]
    sizes = [result.gpu_gib for result in good if result.gpu_gib is not None]
    cell.metric = next((result.test_metric for result in good), None)
    cell.dev_metric = next((result.dev_metric for result in good), None)
    cell.mean = statistics.fmean(tests) if tests else None
    cell.spread = statistics.stdev(tests) if len(tests) > 1 else None
    cell.dev_mean = statistics.fmean(devs) if devs else None
    cell.seconds = statistics.fmean(result.seconds for result in good) if good else None
    cell.gpu_gib = max(sizes, default=None)
    return cell


def zero_shot_cell(result: Result) -> Cell:
    return _filled(Cell(result.model, result.task, ZERO_SHOT, (), runs=[result]))


def number(metric: str | None, value: float | None) -> str:
    """A value as usually published, without its name; a dash for none."""
    if metric is None or value is None:
        return "-"
    return as_published(metric, value).removeprefix(f"{metric} ").removesuffix(" %")


def shown(cell: Cell) -> str:
    """`88.4 ± 0.3`, with a mark if seeds are missing or failed; or the reason why there is no number."""
    if cell.mean is not None:
        spread = "" if cell.spread is None else f" ± {number(cell.metric, cell.spread)}"
        return number(cell.metric, cell.mean) + spread + (f" ({cell.partial})" if cell.partial else "")
    return "..." if cell.missing else "failed" if cell.errors else "-"


@dataclass
class Grid:
    """The table of one model. metrics: of each task, "" where none is known yet. mean: the heading of the column with
    means over tasks; "" if there is none: for a single task, and where a smaller value of a metric is better."""

    metrics: dict[str, str]
    mean: str
    rows: dict[str, list[Cell | None]]  # by method, a cell per task: a task with a new head has no untrained model


def grid_of(cells: Sequence[Cell]) -> Grid:
    metrics: dict[str, str] = {}
    for cell in cells:
        metrics[cell.task] = metrics.get(cell.task) or cell.metric or ""
    known = list(dict.fromkeys(metric for metric in metrics.values() if metric))
    mean = "mean" if len(known) < 2 else f"mean of {', '.join(known[:-1])} and {known[-1]}"
    places = {(cell.method, cell.task): cell for cell in cells}
    rows = {method: [places.get((method, task)) for task in metrics] for method, _ in places}
    return Grid(metrics, "" if len(metrics) < 2 or any(map(lower_is_better, known)) else mean, rows)


def average(cells: Sequence[Cell | None]) -> str:
    """The mean over tasks, if every one has a number; "" otherwise. None: a task on which the method has no cell."""
    known = [cell.mean for cell in cells if cell is not None and cell.mean is not None]
    return f"{100 * statistics.fmean(known):.1f}" if len(known) == len(cells) > 1 else ""


def point_text(point: Point | None) -> str:
    """`learning_rate=1e-05, warmup_ratio=0.1`."""
    return ", ".join(f"{key}={value}" for key, value in point or ()) or "-"


def to_json(comparison: Comparison, cells: Sequence[Cell], environment: Mapping[str, Any]) -> str:
    rows = [asdict(cell) | {"errors": cell.errors} for cell in cells]
    about = {"title": comparison.title, "source": comparison.source, "choose_by": comparison.choose_by}
    told = {"seeds": comparison.seeds, "models": comparison.models, "environment": environment, "cells": rows}
    return json_text(about | told, indent=1) + "\n"


def troubles(cells: Sequence[Cell]) -> list[tuple[Cell, bool, str, str]]:
    """What failed, and what runs warned of: the cell, whether it failed, which runs, and the message."""
    found = []
    for cell in cells:
        found += [(cell, True, run_text([result]), result.error) for result in cell.grid if result.error]
        runs = {result.id: result for result in [*cell.grid, *cell.runs]}.values()
        for text in dict.fromkeys(text for result in runs for text in result.warnings):
            found.append((cell, False, run_text([result for result in runs if text in result.warnings]), text))
    return found


def to_markdown(comparison: Comparison, cells: Sequence[Cell]) -> str:
    """table.md: a table per model, then the chosen settings, and the failures."""
    parts, chosen = [f"# {_plain(comparison.title)}"], []
    for model in comparison.models:
        grid, rows = grid_of([cell for cell in cells if cell.model == model]), []
        columns = [f"{task} ({metric})" if metric else task for task, metric in grid.metrics.items()]
        for method, row in grid.rows.items():
            numbers = ["-" if cell is None else shown(cell) for cell in row]
            rows.append([method, *numbers, *([average(row)] if grid.mean else [])])
        parts += [f"## {_plain(model)}", _table(["method", *columns, *([grid.mean] if grid.mean else [])], rows, 1)]
    for cell in cells:
        place = [cell.model, cell.task, cell.method]
        dev = "" if cell.dev_mean is None or cell.dev_metric == cell.metric else f" {cell.dev_metric}"
        test = "" if cell.mean is None else f" {cell.metric}"
        size = "-" if cell.gpu_gib is None else f"{cell.gpu_gib:.2f}"
        seconds = "-" if cell.seconds is None else f"{cell.seconds:.1f}"
        numbers = [number(cell.dev_metric, cell.dev_mean) + dev, shown(cell) + test, seconds, size]
        count = len({result.id for result in [*cell.grid, *cell.runs]})
        chosen.append([*place, point_text(cell.chosen), *numbers, f"{count}"])
    head = ["model", "task", "method", "chosen", "dev", "test", "seconds", "GPU GiB", "runs"]
    ends = [
        f"- {'failed: ' * failed}{_plain(', '.join([cell.model, cell.task, cell.method, about]))}: {_plain(text)}"
        for cell, failed, about, text in troubles(cells)
    ]
    about = (
        f"Chosen by dev ({comparison.choose_by}); test: mean ± standard deviation over the seeds of the chosen point; "
        "seconds: of one run's steps; runs: of all points and seeds"
    )
    return "\n\n".join([*parts, _table(head, chosen, 4), about, "\n".join(ends)]).rstrip() + "\n"


def run_text(runs: Sequence[Result]) -> str:
    """`learning_rate=0.01, seed 0` of a single run; `3 runs` of several."""
    return f"{len(runs)} runs" if len(runs) > 1 else f"{point_text(runs[0].grid)}, seed {runs[0].seed}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], names: int) -> str:
    """names: the columns of text; the others are flush right."""
    lines = [[_plain(cell) for cell in row] for row in (head, *rows)]
    lines.insert(1, ["---" if i < names else "---:" for i in range(len(head))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Escapes text for a Markdown cell: no line breaks, no cell ends, no HTML, no links."""
    return re.sub(r"[\\|`\[]", r"\\\g<0>", escape(printable(" ".join(text.split()), len(text)), quote=False))
