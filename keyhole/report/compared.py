"""Several runs side by side: one page, and a short table for a terminal.

It shows the curves of all runs in common charts, over steps and over training time; the final results; and the settings
in which the runs differ, which is usually the question. A run that is still training is shown up to its latest step.
Runs are named by their directories, with as much of the path as is needed to distinguish them.
"""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from keyhole.machine.text import aligned, counted, duration, printable
from keyhole.pages.chart import chart
from keyhole.pages.frame import charts, choice, colour_of, header, page, section, td, th, tr
from keyhole.pages.frame import table as html_table
from keyhole.report.page import LABELS, Along, both_ways, shown_metrics
from keyhole.report.parts import STYLE
from keyhole.report.story import METRICS, PAGE, View

COLUMNS = ("run", "method", "model", "state", "steps", "loss", "dev", "test", "tokens/s", "GPU GiB", "time")
LEFT = {0, 1, 2, 3}  # columns of text
MOST_CHARTS, MOST_VALUE = 8, 120
NO_METRICS = ("eval_tokens", "eval_rows", "eval_questions")


def cells(view: View) -> list[str]:
    """A row of the table, as text; terminal and page show the same."""
    story, curves = view.story, view.curves
    first, last = (curves.losses[0][1], curves.losses[-1][1]) if curves.losses else (None, None)
    model, results = view.title.partition(" on ")[2], list[str]()
    for kind in ("eval", "test"):  # of the step that is the run's result, which is named if it is not the last one
        step, numbers = curves.result(kind)
        told = shown_metrics(numbers, kind)
        results.append(f"step {step:,}: {told}" if told and step < curves.last_step else told or "-")
    return [
        view.name,
        story.method or "-",
        model or "-",
        story.state or "-",
        f"{curves.last_step:,}" + (f" of {story.total:,}" if story.total > curves.last_step else ""),
        "-" if first is None else f"{first:.4f} -> {last:.4f}",
        *results,
        f"{curves.pace:,.0f}" if curves.pace else "-",
        f"{curves.highest['gpu_gib']:.2f}" if "gpu_gib" in curves.highest else "-",
        duration(curves.seconds),
    ]


def table(views: Sequence[View]) -> list[str]:
    """Lines for a terminal: the table, and what the metrics of a run lack."""
    rows = [list(COLUMNS), *([printable(cell, 60) for cell in cells(view)] for view in views)]
    kept = _kept(rows[1:])
    lines = aligned([[row[i] for i in kept] for row in rows], left=[n for n, i in enumerate(kept) if i in LEFT])
    return [*lines, *(f"warning: {line}" for line in lacks(views))]


def _kept(rows: Sequence[Sequence[str]]) -> list[int]:
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
    count = counted(len(views), "run")
    title = f"{count} side by side" if len(views) > 1 else views[0].title
    known = [(found["eval_loss"], view) for view in views if "eval_loss" in (found := view.curves.result("eval")[1])]
    lead = "Each as far as it has come."
    if len(known) > 1:
        loss, best = min(known, key=lambda one: one[0])
        lead = f"The lowest held-out loss is <b>{loss:.4f}</b>, of <b>{escape(best.name)}</b>."
    panels = [(a.choice, _charts(views, colours, a)) for a in both_ways([view.curves for view in views])]
    parts = [
        header("keyhole report", title, lead, [methods] if methods else []),
        _table(views, colours, place),
        section("Curves", choice("along", panels)),
        _differences(views, colours),
    ]
    return page(f"keyhole report: {count}", parts, STYLE)


def _table(views: Sequence[View], colours: dict[str, int], place: Path) -> str:
    rows = [[printable(text, 200) for text in cells(view)] for view in views]
    kept, lines = _kept(rows), []
    for view, texts in zip(views, rows, strict=True):
        own, link = view.directory / PAGE, ""
        if own.is_file():
            link = quote(os.fsencode(Path(os.path.relpath(own.absolute(), place.absolute())).as_posix()))
        marks = [td(texts[i], "left" if i in LEFT else "") for i in kept[1:]]
        lines.append(tr(texts[0], marks, colours[view.name], link=link))
    notes = "".join(f"<p class='note'>{escape(line)}</p>" for line in lacks(views))
    head = [th(COLUMNS[i], "left" if i in LEFT else "") for i in kept]
    return f"<section>{html_table(head, lines)}{notes}</section>"


def _charts(views: Sequence[View], colours: dict[str, int], along: Along) -> str:
    evaluated = dict.fromkeys(name for view in views for name in view.curves.evaluated)
    stepped = dict.fromkeys(name for view in views for name in view.curves.names)
    metrics = [name for name in evaluated if name.startswith("eval_") and name not in NO_METRICS]
    first = [name for name in ("learning_rate", "tokens_per_second", "gpu_gib") if name in stepped]
    rest = [name for name in stepped if name not in (*first, "loss", "host_gib")]
    figures = [
        ("loss", "loss", Along.of_steps),
        *((f"dev {name.removeprefix('eval_')}", name, Along.of_evaluations) for name in metrics),
        *((LABELS.get(name, name.replace("_", " ")), name, Along.of_steps) for name in (*first, *rest)),
    ]
    drawn = []
    for label, number, draw in figures:
        lines = [line for view in views for line in draw(along, view.curves, number, view.name, colours[view.name])]
        drawn += [chart(lines, f"{label} by {along.label}", along.label, label[:40])] if lines else []
    return charts(drawn[:MOST_CHARTS])


def _differences(views: Sequence[View], colours: dict[str, int]) -> str:
    """The settings that differ between the runs; those of one level of sections are dotted."""
    flat: list[dict[str, object]] = []
    for view in views:
        flat.append({})
        for key, value in view.settings.items():
            inner = {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {}
            flat[-1] |= inner if isinstance(value, dict) else {str(key): value}
    keys = [key for key in dict.fromkeys(key for each in flat for key in each) if key != "output_dir"]
    differ = [key for key in keys if len({repr(each.get(key)) for each in flat}) > 1]
    if not differ or len(views) < 2:
        return ""
    rows = []
    for view, each in zip(views, flat, strict=True):
        texts = [td(printable(each.get(key, "-"), MOST_VALUE), "left") for key in differ]
        rows.append(tr(printable(view.name, 200), texts, colours[view.name]))
    head = [th("run"), *(th(printable(key, 60), "left") for key in differ)]
    return section("Settings that differ", html_table(head, rows))
