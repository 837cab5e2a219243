"""report.html: the comparison as one self-contained page, without scripts or external files.

From top to bottom: the winner, in a sentence; a table per model; for every task the dev metric over steps and over
training time, and the test metric over GPU memory; every point of every grid; failures and warnings; and how to run it
again. It follows the reader's light or dark theme and fits a phone. All text from files or settings is escaped.
"""

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from keyhole.compare.file import ZERO_SHOT, Comparison
from keyhole.compare.result import lower_is_better
from keyhole.compare.table import Cell, average, grid_of, number, point_text, shown, troubles
from keyhole.machine.text import counted, duration
from keyhole.pages.chart import Series, chart
from keyhole.pages.frame import charts, colour_of, details, header, machine_text, page, section, table, td, th, tr

ALONG = ("step", "seconds of training")


def make_page(comparison: Comparison, cells: Sequence[Cell], environment: Mapping[str, Any]) -> str:
    colours = colour_of(dict.fromkeys(cell.method for cell in cells if cell.method != ZERO_SHOT))
    results = {result.id: result for cell in cells for result in (*cell.grid, *cell.runs)}
    done, missing = {result.id for cell in cells for result in cell.grid}, sum(cell.missing for cell in cells)
    facts = [
        counted(len(done), "run") + (f", {missing} to come" if missing else ""),
        f"{duration(sum(result.seconds for result in results.values()))} of training",
        counted(len(comparison.seeds), "seed"),
        "settings chosen by dev, numbers of test",
    ]
    parts = [header("keyhole compare", comparison.title, _lead(cells), facts)]
    for model in comparison.models:
        own = [cell for cell in cells if cell.model == model]
        parts.append(section(model, _table(own, colours)))
        for task in dict.fromkeys(cell.task for cell in own):
            parts.append(section(task, _charts(task, [cell for cell in own if cell.task == task], colours), level=3))
    parts += [_every_run(cells, colours), *_troubles(cells), _again(comparison, environment)]
    return page(comparison.title, parts)


def _best(cells: Sequence[Cell]) -> Cell | None:
    known = [cell for cell in cells if cell.mean is not None and cell.method != ZERO_SHOT]
    if not known:
        return None
    sign = 1 if lower_is_better(known[0].metric or "") else -1
    return min(known, key=lambda cell: sign * (cell.mean or 0.0))


def _lead(cells: Sequence[Cell]) -> str:
    said = []
    for model, task in dict.fromkeys((cell.model, cell.task) for cell in cells):
        own = [cell for cell in cells if (cell.model, cell.task) == (model, task)]
        best, before = _best(own), next((cell for cell in own if cell.method == ZERO_SHOT), None)
        if best is not None:
            known = before is not None and before.mean is not None
            start = f", from {number(before.metric, before.mean)} untrained" if before is not None and known else ""
            trained, value = [cell for cell in own if cell.method != ZERO_SHOT], number(best.metric, best.mean)
            equal = [cell.method for cell in trained if number(cell.metric, cell.mean) == value]  # they lead together
            leads = f"leads with {shown(best)}" if len(equal) == 1 else f"lead with {value}"
            leads = escape(f"{' and '.join(equal)} {leads} {best.metric or ''}")
            said.append(f"<b>{escape(_place(best, cells))}</b>: {leads}{start}")
    return "; ".join(said) + "." if said else "No run is finished yet."


def _table(cells: Sequence[Cell], colours: Mapping[str, int]) -> str:
    grid, rows = grid_of(cells), []
    best = [_best([cell for cell in cells if cell.task == task]) for task in grid.metrics]
    head = [
        th("method"),
        *(th(task, "long", metric) for task, metric in grid.metrics.items()),
        *([th("mean", unit=grid.mean.removeprefix("mean").lstrip())] if grid.mean else []),
        *(th("GPU", unit="GiB"), th("time", unit="per run")),
    ]
    for method, row in grid.rows.items():
        line = [_cell(cell, first, cells) for cell, first in zip(row, best, strict=True)]
        line += [td(average(row), "mean")] if grid.mean else []
        sizes = [cell.gpu_gib for cell in row if cell is not None and cell.gpu_gib is not None]
        seconds = [cell.seconds for cell in row if cell is not None and cell.seconds]
        line += [td(f"{max(sizes):.2f}" if sizes else "-"), td(duration(statistics.fmean(seconds)) if seconds else "-")]
        rows.append(tr(method, line, colours.get(method, -1), "untrained" if method == ZERO_SHOT else ""))
    return table(head, rows, "")


def _cell(cell: Cell | None, best: Cell | None, cells: Sequence[Cell]) -> str:
    if cell is None:
        return td("-")
    if cell.mean is None:
        return f"<td class='none' title='{escape('; '.join(cell.errors)[:400])}'>{escape(shown(cell))}</td>"
    known = [c.mean for c in cells if c.task == cell.task and c.mean is not None]
    low, high = min(known), max(known)
    share = 1.0 if high == low else (cell.mean - low) / (high - low)
    share = 1 - share if lower_is_better(cell.metric or "") else share
    spread = "" if cell.spread is None else f"<i>± {escape(number(cell.metric, cell.spread))}</i>"
    first = best is not None and number(cell.metric, cell.mean) == number(best.metric, best.mean)
    mark = " class='best'" if first and cell.method != ZERO_SHOT else ""
    more = f"<span class='warn' title='{escape('; '.join(cell.errors)[:400])}'>!</span>" if cell.errors else ""
    more += f"<small>{cell.partial}</small>" if cell.partial else ""
    bar = f"<span class='bar'><span style='width:{6 + 94 * share:.0f}%'></span></span>"
    return f"<td{mark}><b>{escape(number(cell.metric, cell.mean))}</b>{spread}{more}{bar}</td>"


def _curve(cell: Cell, colour: int, along: int) -> Series:
    """The dev metric of the chosen runs: mean, lowest and highest, over this one of ALONG."""
    runs = [run for run in cell.runs if not run.error and run.curve]
    factor, made = _scale(cell.dev_metric), Series(cell.method, colour, [], [])
    for rows in zip(*(run.curve for run in runs), strict=False):
        values = [factor * row[2] for row in rows if row[2] is not None]
        if values:
            made.x.append(statistics.fmean(row[along] for row in rows))
            made.y.append(statistics.fmean(values))
            made.low.append(min(values))
            made.high.append(max(values))
    return made


def _charts(task: str, cells: Sequence[Cell], colours: Mapping[str, int]) -> str:
    trained = [cell for cell in cells if cell.method in colours and cell.runs]
    before = next((cell for cell in cells if cell.method == ZERO_SHOT), None)
    dev = next((cell.dev_metric for cell in trained if cell.dev_metric), "metric") or "metric"
    test = next((cell.metric for cell in trained if cell.metric), None) or "metric"
    start = None if before is None or before.dev_mean is None else _scale(dev) * before.dev_mean
    figures = []
    for along, label in enumerate(ALONG):
        lines = [_curve(cell, colours[cell.method], along) for cell in trained]
        figures.append(chart(lines, f"{task}: dev {dev} by {label}", label, f"dev {dev}", start))
    points = []
    for cell in (cell for cell in trained if cell.gpu_gib is not None and cell.mean is not None):
        mean, spread = (_scale(cell.metric) * (value or 0.0) for value in (cell.mean, cell.spread))
        low, high = [mean - spread], [mean + spread]
        points.append(Series(cell.method, colours[cell.method], [cell.gpu_gib or 0.0], [mean], low, high))
    if points:
        figures.append(chart(points, f"{task}: test {test} by memory", "peak GPU memory, GiB", f"test {test}"))
    return charts(figures) if trained else ""


def _scale(metric: str | None) -> float:
    return 1.0 if lower_is_better(metric or "") else 100.0


def _every_run(cells: Sequence[Cell], colours: Mapping[str, int]) -> str:
    rows = []
    for cell in cells:
        for result in sorted(cell.grid, key=lambda result: result.seed):
            line = [td(_place(cell, cells), "left"), td(point_text(result.grid), "left"), td(f"{result.seed}")]
            numbers = [number(result.dev_metric, result.dev), number(result.test_metric, result.test)]
            line += map(td, [*numbers, f"{result.best_step or '-'}"] if not result.error else [])
            if result.error:
                line.append(f"<td colspan='3' class='left none'>failed: {escape(result.error[:300])}</td>")
            rows.append(tr(cell.method, line, colours.get(cell.method), "chosen" if result.grid == cell.chosen else ""))
    head = [th("method"), th("task", "left"), th("settings", "left"), *map(th, ("seed", "dev", "test", "best step"))]
    return f"<section>{details('Every run', table(head, rows))}</section>" if rows else ""


def _place(cell: Cell, cells: Sequence[Cell]) -> str:
    """The task, with the model if there are several."""
    return f"{cell.task}, {cell.model}" if len({each.model for each in cells}) > 1 else cell.task


def _troubles(cells: Sequence[Cell]) -> list[str]:
    items = {True: "", False: ""}
    for cell, failed, about, text in troubles(cells):
        place = f"<b>{escape(cell.method)}</b> on {escape(_place(cell, cells))}"
        items[failed] += f"<li>{place}, {escape(about)}: {escape(text[:1000])}</li>"
    titles = {"What failed": items[True], "What runs warned of": items[False]}
    return [section(title, f"<ul>{own}</ul>" if own else "", level=3) for title, own in titles.items()]


def _again(comparison: Comparison, environment: Mapping[str, Any]) -> str:
    choice = "the first seed" if comparison.choose_by == "first-seed" else "the mean of all seeds"
    return section(
        "How it was run",
        f"<p>Of each grid the settings with the best dev metric are taken, by {choice}; then the other seeds are run. "
        "Test is that of the best step by dev, unless load_best_model_at_end is false. A band reaches from the lowest "
        "seed to the highest; ± is the standard deviation. Time is that of the training steps, without evaluations."
        f"</p>{details('The file', f'<pre>{escape(comparison.text)}</pre>')}{machine_text(environment)}"
        f"<pre>{escape(comparison.command)}</pre>",
        level=3,
    )
