"""Several runs side by side: one page, and a short table for a terminal.

It shows the curves of all runs in common charts, over steps and over training time; the final results; and the settings
in which the runs differ, which is usually the question. A run that is still training is shown up to its latest step.
Runs are named by their directories, with as much of the path as is needed to distinguish them.
"""

import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from keyhole.machine.text import duration, printable
from keyhole.pages.chart import Series, chart, noisy
from keyhole.pages.frame import choice, colour_of, header, page
from keyhole.report.page import EXACT, LABELS, is_plain, shown_metrics, unit_of
from keyhole.report.parts import STYLE
from keyhole.report.view import METRICS, PAGE, View

COLUMNS = ("run", "method", "model", "state", "steps", "loss", "dev", "test", "tokens/s", "GPU GiB", "time")
LEFT = {0, 1, 2, 3}  # columns of text
MOST_CHARTS, MOST_VALUE = 8, 120
UNTOLD = {"output_dir"}


def name_runs(directories: Sequence[Path]) -> list[str]:
    """A name for each run/ directory: its output_dir, with as many parents as are needed to distinguish all."""
    paths = [directory.absolute().parent.parts for directory in directories]
    for depth in range(1, max(map(len, paths), default=1) + 1):
        names = [os.path.join(*parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [str(Path(*parts)) for parts in paths]


def cells(view: View) -> list[str]:
    """A row of the table, as text; terminal and page show the same."""
    story, curves = view.story, view.curves
    first, last = (curves.losses[0][1], curves.losses[-1][1]) if curves.losses else (None, None)
    model = view.title.partition(" on ")[2]
    return [
        view.name,
        story.method or "-",
        model or "-",
        story.state or "-",
        f"{curves.last_step:,}" + (f" of {story.total:,}" if story.total > curves.last_step else ""),
        "-" if first is None else f"{first:.4f} -> {last:.4f}",
        _result(view, "eval"),
        _result(view, "test"),
        f"{curves.pace:,.0f}" if curves.pace else "-",
        f"{curves.highest['gpu_gib']:.2f}" if "gpu_gib" in curves.highest else "-",
        duration(curves.seconds),
    ]


def _result(view: View, kind: str) -> str:
    """The metrics of the step that is the run's result, which is named if it is not the last one."""
    step, numbers = view.curves.result(kind)
    told = shown_metrics(numbers, kind)
    return f"step {step:,}: {told}" if told and step < view.curves.last_step else told or "-"


def table(views: Sequence[View]) -> list[str]:
    """Lines for a terminal: the table, and what the metrics of a run lack."""
    rows = [list(COLUMNS), *([printable(cell, 60) for cell in cells(view)] for view in views)]
    kept = _kept(rows[1:])
    widths = {i: max(len(row[i]) for row in rows) for i in kept}
    return [
        "  ".join(f"{row[i]:<{widths[i]}}" if i in LEFT else f"{row[i]:>{widths[i]}}" for i in kept).rstrip()
        for row in rows
    ] + [f"warning: {line}" for line in lacks(views)]


def _kept(rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns that hold anything."""
    return [i for i in range(len(COLUMNS)) if i < 2 or any(row[i] != "-" for row in rows)]


def lacks(views: Sequence[View]) -> list[str]:
    """Which runs have lines in their metrics that cannot be read, and how many."""
    return [
        f"{printable(view.name, 200)}: {view.unreadable:,} of the lines of {METRICS} cannot be read, and are left out"
        for view in views
        if view.unreadable
    ]


def make_page(views: Sequence[View], place: Path) -> str:
    """The page. place: its directory, for links to the runs' own pages."""
    colours = colour_of(view.name for view in views)
    methods = ", ".join(dict.fromkeys(view.story.method for view in views if view.story.method))
    count = f"{len(views)} {'run' if len(views) == 1 else 'runs'}"
    title = f"{count} side by side" if len(views) > 1 else views[0].title
    parts = [
        header("keyhole report", title, _lead(views), [methods] if methods else []),
        _table(views, colours, place),
        _curves(views, colours),
        _differences(views, colours),
    ]
    return page(f"keyhole report: {count}", parts, STYLE)


def _lead(views: Sequence[View]) -> str:
    known = [(view.curves.last("eval")["eval_loss"], view) for view in views if "eval_loss" in view.curves.last("eval")]
    if len(known) < 2:
        return "Each as far as it has come."
    loss, best = min(known, key=lambda one: one[0])
    return f"The lowest held-out loss at the last evaluation is <b>{loss:.4f}</b>, of <b>{escape(best.name)}</b>."


def _table(views: Sequence[View], colours: dict[str, int], place: Path) -> str:
    rows = []
    kept = _kept([cells(view) for view in views])
    for view in views:
        found = cells(view)
        own = view.directory / PAGE
        shown = escape(printable(found[0], 200))
        if own.is_file():
            link = os.path.relpath(own.absolute(), place.absolute())
            shown = f"<a href='{escape(quote(os.fsencode(Path(link).as_posix())))}'>{shown}</a>"
        marks = "".join(
            f"<td class='left'>{escape(printable(found[i], 200))}</td>" if i in LEFT else f"<td>{escape(found[i])}</td>"
            for i in kept[1:]
        )
        dot = f"<span class='dot b{colours[view.name]}'></span>"
        rows.append(f"<tr><th scope='row'>{dot}{shown}</th>{marks}</tr>")
    notes = "".join(f"<p class='note'>{escape(line)}</p>" for line in lacks(views))
    head = "".join(f"<th{' class=left' if i in LEFT else ''}>{COLUMNS[i]}</th>" for i in kept)
    return (
        f"<section><div class='scroll'><table class='small'><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>{notes}</section>"
    )


def _curves(views: Sequence[View], colours: dict[str, int]) -> str:
    size, unit = unit_of(max((view.curves.seconds for view in views), default=0.0))
    panels = []
    for label, over_time in (("over steps", False), ("over time", True)):
        scale = (lambda x: [value / size for value in x]) if over_time else (lambda x: x)
        along = f"{unit} of training" if over_time else "step"
        panels.append((label, _charts(views, colours, over_time, scale, along)))
    return f"<section><h2>Curves</h2>{choice('along', panels)}</section>"


def _charts(
    views: Sequence[View],
    colours: dict[str, int],
    over_time: bool,
    scale: Callable[[list[float]], list[float]],
    along: str,
) -> str:
    def of_steps(name: str) -> list[Series]:
        found = [(view, *view.curves.mean(name, over_time)) for view in views]
        draw = Series if name in EXACT else noisy
        return [draw(_end(view.name), colours[view.name], scale(x), y) for view, x, y in found if x]

    def of_evaluations(name: str) -> list[Series]:
        found = [(view, *view.curves.evaluation(name, over_time)) for view in views]
        factor = 1.0 if is_plain(name) else 100.0
        return [
            Series(_end(view.name), colours[view.name], scale(x), [factor * value for value in y], dots=True)
            for view, x, y in found
            if x
        ]

    evaluated = dict.fromkeys(name for view in views for name in view.curves.evaluated)
    stepped = dict.fromkeys(name for view in views for name in view.curves.names)
    figures = [("loss", of_steps("loss"))]
    figures += [(f"dev {name.removeprefix('eval_')}", of_evaluations(name)) for name in evaluated if _is_metric(name)]
    first = [name for name in ("learning_rate", "tokens_per_second", "gpu_gib") if name in stepped]
    rest = [name for name in stepped if name not in (*first, "loss", "host_gib")]
    figures += [(LABELS.get(name, name.replace("_", " ")), of_steps(name)) for name in (*first, *rest)]
    drawn = [chart(lines, f"{label} by {along}", along, label[:40]) for label, lines in figures if lines][:MOST_CHARTS]
    return "<div class='charts'>" + "".join(f"<figure>{each}</figure>" for each in drawn) + "</div>"


def _is_metric(name: str) -> bool:
    return name.startswith("eval_") and name not in ("eval_tokens", "eval_rows", "eval_questions")


def _end(name: str) -> str:
    """Shortens a long name to its end, which distinguishes runs."""
    return name if len(name) <= 16 else f"…{name[-15:]}"


def _differences(views: Sequence[View], colours: dict[str, int]) -> str:
    """The settings that differ between the runs."""
    flat = [_flat(view.settings) for view in views]
    keys = [key for key in dict.fromkeys(key for each in flat for key in each) if key not in UNTOLD]
    differ = [key for key in keys if len({repr(each.get(key)) for each in flat}) > 1]
    if not differ or len(views) < 2:
        return ""
    head = "".join(f"<th class='left'>{escape(printable(key, 60))}</th>" for key in differ)
    rows = "".join(
        f"<tr><th scope='row'><span class='dot b{colours[view.name]}'></span>{escape(printable(view.name, 200))}</th>"
        + "".join(f"<td class='left'>{escape(printable(each.get(key, '-'), MOST_VALUE))}</td>" for key in differ)
        + "</tr>"
        for view, each in zip(views, flat, strict=True)
    )
    return (
        f"<section><h2>Settings that differ</h2><div class='scroll'><table class='small'><thead><tr><th>run</th>{head}"
        f"</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _flat(settings: dict[Any, Any]) -> dict[str, Any]:
    """Dotted key -> value, for a config with one level of sections; of the methods' sections only the one in use."""
    made: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            made |= {f"{key}.{name}": each for name, each in value.items()}
        else:
            made[str(key)] = value
    return made
