"""Sections of a run's page: memory and pace, the data, answers, decisions, events, the environment."""

from html import escape
from itertools import groupby
from typing import Any

from keyhole.machine.sizes import GIB, MIB
from keyhole.machine.text import printable
from keyhole.pages.frame import machine_text
from keyhole.pages.style import COLOURS
from keyhole.report.curves import Curves
from keyhole.report.story import Answers, Sample, Story
from keyhole.report.view import View

STYLE = """
.progress{display:block;height:6px;border-radius:3px;background:var(--line);margin:18px 0 0;overflow:hidden}
.progress span{display:block;height:100%;background:var(--glow)}
.sizes{display:grid;grid-template-columns:max-content 1fr max-content;gap:8px 12px;align-items:center;max-width:860px}
.sizes .stack{display:flex;height:18px;border-radius:4px;overflow:hidden;background:var(--line)}
.sizes .stack span{display:block;height:100%}.sizes b{font-variant-numeric:tabular-nums}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;padding:0;margin:10px 0;font-size:13px;
color:var(--soft)}.legend .dot{margin-right:6px}
.sample{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 16px;margin:10px 0}
.sample h4{margin:0 0 6px;font-size:13px;color:var(--soft);font-weight:600;overflow-wrap:anywhere}
.tokens{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.75 ui-monospace,"DejaVu Sans Mono",monospace}
.tokens span{border-bottom:1px dotted var(--line)}
.tokens .on{background:rgba(59,111,224,.2);border-bottom:2px solid #3b6fe0;font-weight:600}
.answers td{text-align:left;white-space:pre-wrap;overflow-wrap:anywhere;min-width:16ch;max-width:60ch}
.answers .yes{color:#14957d;font-weight:700}.answers .no{color:#cc3f55;font-weight:700}
.why{display:grid;grid-template-columns:max-content 1fr;gap:4px 18px;margin:0;background:var(--card);
border:1px solid var(--line);border-radius:12px;padding:12px 16px}
.why dt{color:var(--soft);font-weight:600}.why dd{margin:0;overflow-wrap:anywhere;min-width:0}
.lane{fill:var(--line)}.trace{overflow-x:auto}.trace svg{min-width:600px}
.log{white-space:pre-wrap;overflow-wrap:anywhere}
@media (max-width:560px){.answers thead{display:none}.answers tr,.answers td{display:block}
.answers tr:not(:last-child){border-bottom:1px solid var(--line)}.answers td:empty{display:none}
.answers td{border:0;min-width:0;max-width:none}
.answers td::before{content:attr(data-of);display:block;color:var(--soft);font-size:11px;font-weight:400}
.why{grid-template-columns:1fr}.why dd{margin-bottom:8px}
.sizes{grid-template-columns:1fr}.sizes b{margin-bottom:8px}}
"""


def size(count: float) -> str:
    """Bytes as readable text."""
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / MIB:.1f} MiB"


def memory_and_pace(story: Story, curves: Curves) -> str:
    """Planned beside measured: memory of the device by its parts, host memory, seconds of a step."""
    plan, measured = story.planned, story.measured
    device: list[tuple[str, Any, Any]] = []
    device += [("GPU, planned", plan.get("device_bytes"), plan.get("parts"))] if story.device == "cuda" else []
    device += [("GPU, measured", measured.get("device_bytes"), None)] if story.device == "cuda" else []
    host: list[tuple[str, Any, Any]]
    host = [("host, planned", plan.get("host_bytes"), None), ("host, measured", measured.get("host_bytes"), None)]
    blocks = [_bars([row for row in rows if row[1]]) for rows in (device, host)]
    pace = _pace(story, curves)
    if not any(blocks) and not pace:
        return ""
    return (
        f"<section><h2>Planned and measured</h2>{''.join(blocks)}{pace}<p class='note'>Host memory is what the process "
        "holds while it trains, Python and libraries included.</p></section>"
    )


def _bars(rows: list[tuple[str, float, dict[str, float] | None]]) -> str:
    if not rows:
        return ""
    most = max(count for _, count, _ in rows)
    lines, legend = [], ""
    for name, count, parts in rows:
        spans, shown = "", {part: each for part, each in (parts or {}).items() if each > 0}
        whole = sum(shown.values())
        for i, (part, each) in enumerate(shown.items()):
            width = 100 * count / most * each / whole
            spans += (
                f"<span class='b{i % len(COLOURS)}' style='width:{width:.2f}%' title='{escape(part)}: {size(each)}'>"
                "</span>"
            )
            legend += f"<li><span class='dot b{i % len(COLOURS)}'></span>{escape(part)} {size(each)}</li>"
        spans = spans or f"<span style='width:{100 * count / most:.2f}%;background:var(--soft)'></span>"
        lines.append(f"<span>{escape(name)}</span><span class='stack'>{spans}</span><b>{size(count)}</b>")
    return f"<div class='sizes'>{''.join(lines)}</div>" + (f"<ul class='legend'>{legend}</ul>" if legend else "")


def _pace(story: Story, curves: Curves) -> str:
    plan, measured = story.planned, curves.step_seconds
    seconds = plan.get("seconds") or {}
    if not measured:
        return ""
    said = f"<p>A step takes <b>{measured:.3g} s</b>"
    said += f", {curves.pace:,.0f} tokens per second" if curves.pace else ""
    if seconds.get("total"):
        parts = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items() if name != "total" and value)
        said += f"; planned <b>{seconds['total']:.3g} s</b>, bound by {escape(plan.get('bound_by', ''))} ({parts})"
        said += f"; {escape(plan['source'])}" if plan.get("source") else ""
    crossed = [f"{size(story.measured[name])} {way}" for name, way in CROSSED if story.measured.get(name)]
    said += f". Over the link per step: {' and '.join(crossed)}" if crossed else ""
    return said + ".</p>"


CROSSED = (("up_bytes", "up"), ("down_bytes", "down"))


def data(story: Story) -> str:
    """Rows of the data, with trained tokens marked."""
    if not story.samples:
        return ""
    shown = "".join(_sample(sample) for sample in story.samples)
    return (
        f"<section><h2>The data</h2>{shown}<p class='note'>The first rows, token by token. Marked: trained on; the "
        "rest is only read.</p></section>"
    )


def _sample(sample: Sample) -> str:
    runs = "".join(
        "".join(f"<span{' class=on' if trained else ''}>{escape(word)}</span>" for word in words)
        for trained, words in sample.runs
    )
    head = " · ".join(escape(printable(text, 300)) for text in (sample.where, sample.about) if text)
    return f"<div class='sample'><h4>{head}</h4><div class='tokens'>{runs}</div></div>"


def answers(story: Story) -> str:
    """The model's answers at the last evaluation; those of earlier ones are folded."""
    if not story.answers:
        return ""
    *earlier, last = story.answers
    folded = "".join(
        f"<details><summary>after step {each.step:,}</summary>{_answer_table(each)}</details>"
        for each in reversed(earlier)
    )
    about = f": {escape(last.about)}" if last.about else ""
    tables = f"<p>After step {last.step:,}{about}.</p>{_answer_table(last)}{folded}"
    return f"<section><h2>Sample answers</h2>{tables}</section>"


def _answer_table(found: Answers) -> str:
    marks = {True: "<span class='yes'>right</span>", False: "<span class='no'>wrong</span>", None: ""}
    rows = "".join(
        f"<tr><td data-of='prompt'>{escape(row.prompt)}</td><td data-of='the model'>{escape(row.said)}</td>"
        f"<td data-of='the data'>{escape(row.expected)}</td><td>{marks[row.right]}</td></tr>"
        for row in found.rows
    )
    return (
        "<div class='scroll'><table class='small answers'><thead><tr><th>prompt</th><th class='left'>the model</th>"
        f"<th class='left'>the data</th><th></th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def decisions(story: Story) -> str:
    """The start block. A line `key: text` is a row; indented lines belong to the line before."""
    lines = [line[2:] if line.startswith("  ") else line for line in story.lines[1:]]
    if not lines:
        return ""
    rows = []
    for inner, group in groupby(lines, key=lambda line: line.startswith(" ")):
        if inner:
            text = "\n".join(group)
            rows.append(f"<dt></dt><dd><details><summary>each</summary><pre>{escape(text)}</pre></details></dd>")
            continue
        for line in group:
            key, colon, text = line.partition(": ")
            key, text = (key, text) if colon and len(key) <= 24 else ("", line)
            rows.append(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>")
    return f"<section><h2>What was decided, and why</h2><dl class='why'>{''.join(rows)}</dl></section>"


def events(story: Story) -> str:
    """The printed lines of the run."""
    if not story.events:
        return ""
    text = "\n".join(story.events)
    return f"<section><h2>What happened</h2><pre class='log'>{escape(text)}</pre></section>"


def environment(view: View) -> str:
    """Machine and settings."""
    try:
        machine = machine_text(view.environment) if view.environment else ""
    except (KeyError, TypeError, AttributeError):  # not written by machine/probe.py
        machine = ""
    config = f"<details><summary>config.yaml</summary><pre>{escape(view.config)}</pre></details>" if view.config else ""
    return f"<section><h2>Settings and machine</h2>{config}{machine}</section>" if config or machine else ""
