"""Sections of a run's page: memory and pace, the data, answers, decisions, events, the environment."""

from contextlib import suppress
from html import escape
from itertools import groupby

from keyhole.machine.sizes import GIB, MIB
from keyhole.machine.text import printable
from keyhole.pages.frame import COLOURS, details, machine_text, section, table, th
from keyhole.report.curves import Curves
from keyhole.report.story import Answers, Planned, Story, View

STYLE = """
.progress{display:block;height:6px;border-radius:3px;background:var(--line);margin:18px 0 0;overflow:hidden}
.progress span{display:block;height:100%;background:var(--glow)}
.sizes{display:grid;grid-template-columns:max-content 1fr max-content;gap:8px 12px;align-items:center;max-width:860px}
.sizes .stack{display:flex;height:18px;border-radius:4px;overflow:hidden;background:var(--line)}
.sizes .stack span{display:block;height:100%}.sizes b{font-variant-numeric:tabular-nums}
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
.log{white-space:pre-wrap;overflow-wrap:anywhere}
@media (max-width:560px){.answers thead{display:none}.answers tr,.answers td{display:block}
.answers tr:not(:last-child){border-bottom:1px solid var(--line)}.answers td:empty{display:none}
.answers td{border:0;min-width:0;max-width:none}
.answers td::before{content:attr(data-of);display:block;color:var(--soft);font-size:11px;font-weight:400}
.why{grid-template-columns:1fr}.why dd{margin-bottom:8px}
.sizes{grid-template-columns:1fr}.sizes b{margin-bottom:8px}}
"""


def size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / MIB:.1f} MiB"


def memory_and_pace(story: Story, curves: Curves) -> str:
    """Planned beside measured: memory of the device by its parts, host memory, seconds of a step."""
    plan, measured = story.planned, story.measured
    bars = _bars("host", plan.host_bytes, {}, measured.get("host_bytes", 0.0))
    if story.device == "cuda":
        bars = _bars("GPU", plan.device_bytes, plan.parts, measured.get("device_bytes", 0.0)) + bars
    return section(
        "Planned and measured",
        bars + _pace(plan, curves),
        "Host memory is what the process holds while it trains, Python and libraries included.",
    )


def _bars(place: str, planned: float, planned_parts: dict[str, float], measured: float) -> str:
    most, lines, legend = max(planned, measured), list[str](), ""
    for name, count, parts in (("planned", planned, planned_parts), ("measured", measured, dict[str, float]())):
        if not count:
            continue
        spans, shown = "", {part: each for part, each in parts.items() if each > 0}
        scale = 100 * count / most / max(sum(shown.values()), 1e-9)
        for i, (part, each) in enumerate(shown.items()):
            width = scale * each
            colour = f"b{i % len(COLOURS)}"
            spans += f"<span class='{colour}' style='width:{width:.2f}%' title='{escape(part)}: {size(each)}'></span>"
            legend += f"<li><span class='dot {colour}'></span>{escape(part)} {size(each)}</li>"
        spans = spans or f"<span style='width:{100 * count / most:.2f}%;background:var(--soft)'></span>"
        lines.append(f"<span>{place}, {name}</span><span class='stack'>{spans}</span><b>{size(count)}</b>")
    bars = f"<div class='sizes'>{''.join(lines)}</div>" if lines else ""
    return bars + (f"<ul class='legend'>{legend}</ul>" if legend else "")


def _pace(plan: Planned, curves: Curves) -> str:
    if not curves.step_seconds:
        return ""
    said = f"<p>A step takes <b>{curves.step_seconds:.3g} s</b>"
    said += f", {curves.pace:,.0f} tokens per second" if curves.pace else ""
    if plan.seconds.get("total"):
        parts = ", ".join(f"{name} {value:.3g} s" for name, value in plan.seconds.items() if name != "total" and value)
        said += f"; planned <b>{plan.seconds['total']:.3g} s</b>, bound by {escape(plan.bound_by)} ({escape(parts)})"
        said += f"; {escape(plan.source)}" if plan.source else ""
    return said + ".</p>"


def data(story: Story) -> str:
    shown = ""
    for sample in story.samples:
        runs = "".join(
            "".join(f"<span{' class=on' if trained else ''}>{escape(word)}</span>" for word in words)
            for trained, words in sample.runs
        )
        head = " · ".join(escape(printable(text, 300)) for text in (sample.where, sample.about) if text)
        shown += f"<div class='sample'><h4>{head}</h4><div class='tokens'>{runs}</div></div>"
    return section("The data", shown, "The first rows, token by token. Marked: trained on; the rest is only read.")


def answers(story: Story) -> str:
    """The model's answers at the last evaluation; those of earlier ones are folded."""
    if not story.answers:
        return ""
    *earlier, last = story.answers
    folded = "".join(details(f"after step {each.step:,}", _answer_table(each)) for each in reversed(earlier))
    about = f": {escape(last.about)}" if last.about else ""
    return section("Sample answers", f"<p>After step {last.step:,}{about}.</p>{_answer_table(last)}{folded}")


def _answer_table(found: Answers) -> str:
    marks = {True: "<span class='yes'>right</span>", False: "<span class='no'>wrong</span>", None: ""}
    head = [th("prompt"), th("the model", "left"), th("the data", "left"), th("")]
    rows = [
        f"<tr><td data-of='prompt'>{escape(row.prompt)}</td><td data-of='the model'>{escape(row.said)}</td>"
        f"<td data-of='the data'>{escape(row.expected)}</td><td>{marks[row.right]}</td></tr>"
        for row in found.rows
    ]
    return table(head, rows, "small answers")


def decisions(story: Story) -> str:
    """The start block. A line `key: text` is a row; indented lines belong to the line before."""
    lines = [line[2:] if line.startswith("  ") else line for line in story.lines[1:]]
    rows = ""
    for inner, group in groupby(lines, key=lambda line: line.startswith(" ")):
        if inner:
            text = "\n".join(group)
            rows += f"<dt></dt><dd>{details('each', f'<pre>{escape(text)}</pre>')}</dd>"
            continue
        for line in group:
            key, colon, text = line.partition(": ")
            key, text = (key, text) if colon and len(key) <= 24 else ("", line)
            rows += f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>"
    return section("What was decided, and why", f"<dl class='why'>{rows}</dl>" if rows else "")


def events(story: Story) -> str:
    text = escape("\n".join(story.events))
    return section("What happened", f"<pre class='log'>{text}</pre>" if text else "")


def environment(view: View) -> str:
    machine = ""
    with suppress(KeyError, TypeError, AttributeError):  # not written by machine/probe.py
        machine = machine_text(view.environment) if view.environment else ""
    config = details("config.yaml", f"<pre>{escape(view.config)}</pre>") if view.config else ""
    return section("Settings and machine", config + machine)
