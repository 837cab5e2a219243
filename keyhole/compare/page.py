"""report.html: the comparison as one self-contained page, without scripts or external files.

From top to bottom: the winner, in a sentence; a table per model; for every task the dev metric over steps, over
training time and, if several methods without gradients are compared, over forward passes, and the test metric over GPU
memory; every point of every grid; failures and warnings; and how to run it again. It follows the reader's light or dark
theme and fits a phone. All text from files or settings is escaped.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from keyhole.compare.file import Comparison
from keyhole.compare.names import ZERO_SHOT
from keyhole.compare.plan import NO_NUMBER
from keyhole.compare.result import Result, lower_is_better
from keyhole.compare.table import Cell, average, mean_heading, number, point_text, shown, warned_runs
from keyhole.config.fields import sections, settings
from keyhole.machine.text import counted, duration
from keyhole.pages.chart import Series, chart
from keyhole.pages.frame import colour_of, header, machine_text, page

Settings = Mapping[str, dict[str, Any]]


def make_page(comparison: Comparison, cells: Sequence[Cell], runs: Settings, environment: dict[str, Any]) -> str:
    """The page. runs: the settings of one run of each method and task."""
    names = list(dict.fromkeys(cell.method for cell in cells if cell.method != ZERO_SHOT))
    colours = colour_of(names)
    parts = [_header(comparison, cells)]
    for model in comparison.models:
        own = [cell for cell in cells if cell.model == model]
        parts.append(f"<section><h2>{escape(model)}</h2>{_table(own, colours)}</section>")
        for task in dict.fromkeys(cell.task for cell in own):
            parts.append(_charts(task, [cell for cell in own if cell.task == task], colours))
    parts += [_grids(cells, colours), _failures(cells), _warnings(cells), _again(comparison, cells, runs, environment)]
    return page(comparison.title, parts)


def _header(comparison: Comparison, cells: Sequence[Cell]) -> str:
    done = {result.id for cell in cells for result in cell.grid}
    missing = sum(cell.missing for cell in cells)
    spent = {result.id: result.seconds for cell in cells for result in (*cell.grid, *cell.runs)}
    facts = [
        counted(len(done), "run") + (f", {missing} to come" if missing else ""),
        f"{duration(sum(spent.values()))} of training",
        counted(len(comparison.seeds), "seed"),
        "settings chosen by dev, numbers of test",
    ]
    return header("keyhole compare", comparison.title, _lead(cells), facts)


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
        if best is None:
            continue
        start = (
            "" if before is None or before.mean is None else f", from {number(before.metric, before.mean)} untrained"
        )
        said.append(f"<b>{escape(_place(best, cells))}</b>: {_leader(best, own)} {escape(best.metric or '')}{start}")
    return "; ".join(said) + "." if said else "No run is finished yet."


def _leader(best: Cell, cells: Sequence[Cell]) -> str:
    """The leading method and its number; methods with the same rounded number lead together, or nobody does."""
    trained = [cell for cell in cells if cell.mean is not None and cell.method != ZERO_SHOT]
    value = number(best.metric, best.mean)
    equal = [cell.method for cell in trained if number(cell.metric, cell.mean) == value]
    if len(equal) == 1:
        return f"{escape(best.method)} leads with {escape(shown(best))}"
    if len(equal) == len(trained):
        return f"no method leads, all {len(equal)} have {escape(value)}"
    return f"{escape(', '.join(equal[:-1]))} and {escape(equal[-1])} lead with {escape(value)}"


def _table(cells: Sequence[Cell], colours: Mapping[str, int]) -> str:
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    best = {task: _best([cell for cell in cells if cell.task == task]) for task in tasks}
    metrics = {task: next((c.metric for c in cells if c.task == task and c.metric), "") for task in tasks}
    head = "".join(
        f"<th class='long'>{escape(task)}<small>{escape(metrics[task] or '')}</small></th>" for task in tasks
    )
    mean = mean_heading([*metrics.values()])
    head += f"<th>mean<small>{escape(mean.removeprefix('mean').lstrip())}</small></th>" if mean else ""
    rows = []
    for method in dict.fromkeys(cell.method for cell in cells):
        row = {cell.task: cell for cell in cells if cell.method == method}
        dot = f"<span class='dot b{colours[method]}'></span>" if method in colours else "<span class='dot'></span>"
        numbers = "".join(_cell(row.get(task), best[task], cells) for task in tasks)
        numbers += f"<td class='mean'>{escape(average([row.get(task) for task in tasks]))}</td>" if mean else ""
        sizes = [cell.gpu_gib for cell in row.values() if cell.gpu_gib is not None]
        seconds = [cell.seconds for cell in row.values() if cell.seconds]
        size = f"{max(sizes):.2f}" if sizes else "-"
        time = duration(statistics.fmean(seconds)) if seconds else "-"
        kind = " class='untrained'" if method == ZERO_SHOT else ""
        rows.append(f"<tr{kind}><th scope='row'>{dot}{escape(method)}</th>{numbers}<td>{size}</td><td>{time}</td></tr>")
    return (
        f"<div class='scroll'><table><thead><tr><th>method</th>{head}<th>GPU<small>GiB</small></th>"
        f"<th>time<small>per run</small></th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(cell: Cell | None, best: Cell | None, cells: Sequence[Cell]) -> str:
    if cell is None:
        return "<td>-</td>"
    if cell.mean is None:
        hint = escape("; ".join(cell.errors)[:400])
        return f"<td class='none' title='{hint}'>{escape(shown(cell))}</td>"
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


def _scale(metric: str | None) -> float:
    return 1.0 if lower_is_better(metric or "") else 100.0


Along = Callable[[Result, list[float | None]], float]
ALONG: dict[str, Along] = {
    "step": lambda run, row: row[0] or 0.0,
    "seconds of training": lambda run, row: row[1] or 0.0,
    "forward passes": lambda run, row: run.forwards_at(row[0] or 0.0),
}


def _curve(cell: Cell, colour: int, along: Along) -> Series:
    """The dev metric of the chosen runs over the x value that `along` computes from a run and a row of its curve."""
    runs = [run for run in cell.runs if not run.error and run.curve]
    count, factor = min((len(run.curve) for run in runs), default=0), _scale(cell.dev_metric)
    x, y, low, high = [], [], [], []
    for i in range(count):
        values = [factor * value for run in runs if (value := run.curve[i][2]) is not None]
        if values:
            x.append(statistics.fmean(along(run, run.curve[i]) for run in runs))
            y.append(statistics.fmean(values))
            low.append(min(values))
            high.append(max(values))
    return Series(cell.method, colour, x, y, low, high)


def _memory(cell: Cell, colour: int) -> Series:
    if cell.gpu_gib is None or cell.mean is None:
        return Series(cell.method, colour, [], [], [], [])
    factor, spread = _scale(cell.metric), cell.spread or 0.0
    low, high = factor * (cell.mean - spread), factor * (cell.mean + spread)
    return Series(cell.method, colour, [cell.gpu_gib], [factor * cell.mean], [low], [high])


def _charts(task: str, cells: Sequence[Cell], colours: Mapping[str, int]) -> str:
    trained = [cell for cell in cells if cell.method in colours and cell.runs]
    if not trained:
        return ""
    before = next((cell for cell in cells if cell.method == ZERO_SHOT), None)
    dev = next((cell.dev_metric for cell in trained if cell.dev_metric), "metric") or "metric"
    test = next((cell.metric for cell in trained if cell.metric), None) or "metric"
    start = None if before is None or before.dev_mean is None else _scale(dev) * before.dev_mean
    figures = []
    counting = [cell for cell in trained if all(run.forwards is not None for run in cell.runs if not run.error)]
    for label, along in ALONG.items():
        drawn_by = counting if label == "forward passes" else trained
        if drawn_by is counting and len(counting) < 2:  # forward passes compare methods without gradients
            continue
        lines = [_curve(cell, colours[cell.method], along) for cell in drawn_by]
        title = f"{task}: dev {dev} by {label}"
        figures.append(f"<figure>{chart(lines, title, label, f'dev {dev}', start)}</figure>")
    points = [_memory(cell, colours[cell.method]) for cell in trained]
    if any(each.x for each in points):
        drawn = chart(points, f"{task}: test {test} by memory", "peak GPU memory, GiB", f"test {test}")
        figures.append(f"<figure>{drawn}</figure>")
    return f"<section><h3>{escape(task)}</h3><div class='charts'>{''.join(figures)}</div></section>"


def _grids(cells: Sequence[Cell], colours: Mapping[str, int]) -> str:
    rows = []
    for cell in cells:
        for result in sorted(cell.grid, key=lambda result: result.seed):
            rows.append(_grid_row(cell, _place(cell, cells), result, colours.get(cell.method)))
    if not rows:
        return ""
    head = "<th>method</th><th class='left'>task</th><th class='left'>settings</th><th>seed</th><th>dev</th>"
    head += "<th>test</th><th>best step</th>"
    return (
        "<section><details><summary>Every run</summary><div class='scroll'><table class='small'><thead><tr>"
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details></section>"
    )


def _place(cell: Cell, cells: Sequence[Cell]) -> str:
    """The task, with the model if there are several."""
    return f"{cell.task}, {cell.model}" if len({each.model for each in cells}) > 1 else cell.task


def _grid_row(cell: Cell, place: str, result: Result, colour: int | None) -> str:
    dot = "" if colour is None else f"<span class='dot b{colour}'></span>"
    mark = " class='chosen'" if result.grid == cell.chosen else ""
    head = f"<th scope='row'>{dot}{escape(cell.method)}</th><td class='left'>{escape(place)}</td>"
    head += f"<td class='left'>{escape(point_text(result.grid))}</td><td>{result.seed}</td>"
    if result.error:
        return f"<tr{mark}>{head}<td colspan='3' class='left none'>failed: {escape(result.error[:300])}</td></tr>"
    dev, test = number(result.dev_metric, result.dev), number(result.test_metric, result.test)
    return f"<tr{mark}>{head}<td>{escape(dev)}</td><td>{escape(test)}</td><td>{result.best_step or '-'}</td></tr>"


def _failures(cells: Sequence[Cell]) -> str:
    items = [
        f"<li><b>{escape(cell.method)}</b> on {escape(_place(cell, cells))}, {escape(point_text(result.grid))}, seed "
        f"{result.seed}: {escape(result.error[:1000])}</li>"
        for cell in cells
        for result in cell.grid
        if result.error
    ]
    return f"<section><h3>What failed</h3><ul>{''.join(items)}</ul></section>" if items else ""


def _warnings(cells: Sequence[Cell]) -> str:
    items = [
        f"<li><b>{escape(cell.method)}</b> on {escape(_place(cell, cells))}, {escape(warned_runs(runs))}: "
        f"{escape(text[:1000])}</li>"
        for cell in cells
        for text, runs in cell.warnings.items()
    ]
    return f"<section><h3>What runs warned of</h3><ul>{''.join(items)}</ul></section>" if items else ""


def _again(comparison: Comparison, cells: Sequence[Cell], runs: Settings, environment: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td class='left'>{escape(_told(values))}</td></tr>"
        for name, values in runs.items()
    )
    choice = "the first seed" if comparison.choose_by == "first-seed" else "the mean of all seeds"
    return (
        f"<section><h3>How it was run</h3><p>Of each grid the settings with the best dev metric are taken, by "
        f"{choice}; then the other seeds are run. Test is that of the best step by dev, unless "
        "load_best_model_at_end is false. "
        "A band reaches from the lowest seed to the highest; ± is the standard deviation. Time is that of the training "
        "steps, without evaluations.</p><details><summary>Settings</summary><div class='scroll'><table class='small'>"
        f"<tbody>{rows}</tbody></table></div></details>"
        f"{machine_text(environment)}"
        f"<pre>{escape(comparison.command)}</pre></section>"
    )


def _told(values: dict[str, Any]) -> str:
    """The settings that differ from the defaults."""
    table = settings()
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}.{name}": each for name, each in value.items()} if key in sections() else {key: value}
    kept = {k: v for k, v in flat.items() if k in table and v != table[k].default and k not in NO_NUMBER}
    return ", ".join(f"{key}={value}" for key, value in kept.items() if key != "seed")
