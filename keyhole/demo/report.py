"""The demo's HTML page: one self-contained file, with no script and nothing fetched from anywhere.

From top to bottom: what was done in two sentences, the table, the curves by step and by second, the task
with examples, and everything needed to run it again (settings, seed, versions, commands). It follows the
reader's light or dark theme.
"""

import json
from html import escape
from typing import Any

from keyhole import assets
from keyhole.demo.chart import Line, line_chart
from keyhole.demo.train import Result
from keyhole.machine.sizes import GIB, MIB

COLUMNS = ("method", "steps", "accuracy", "held-out loss", "seconds", "host memory", "GPU memory", "moved")
COLOURS = "#3465d9 #d9642b #16917a #a3489b #b8901a #c23b4e #4aa3c7 #6b7a1f #7a5cc9 #777777".split()
EXAMPLES = 4


def size(count: int) -> str:
    """Bytes for people; a dash for none."""
    return f"{count / MIB:.1f} MiB" if 0 < count < GIB else f"{count / GIB:.2f} GiB" if count else "-"


def cells(result: Result) -> list[str]:
    """One row of the table, as text; the terminal and the page show the same."""
    if result.skipped:
        return [result.method, "skipped", *["-"] * (len(COLUMNS) - 2)]
    return [
        result.method,
        str(result.settings.steps),
        f"{result.accuracy_before:.1%} -> {result.accuracy_after:.1%}",
        f"{result.loss_before:.3f} -> {result.loss_after:.3f}",
        f"{result.seconds:.1f}",
        size(result.host_bytes),
        size(result.gpu_bytes),
        size(result.moved_bytes),
    ]


def make_report(results: list[Result], seed: int, environment: dict[str, Any]) -> str:
    """The page."""
    done = [(i, r) for i, r in enumerate(results) if not r.skipped]
    steps = [Line(r.method, i % len(COLOURS), [float(n + 1) for n in range(len(r.losses))], r.losses) for i, r in done]
    seconds = [Line(r.method, i % len(COLOURS), r.times_s, r.losses) for i, r in done]
    sections = [
        _summary(results),
        _table(results),
        "<h2>Loss curves</h2><div class='charts'>"
        f"<figure>{line_chart(steps, 'loss by step', 'step', 'training loss')}</figure>"
        f"<figure>{line_chart(seconds, 'loss by time', 'seconds', 'training loss')}</figure></div>"
        "<p class='note'>Faint: each step as measured. Strong: running mean. A step costs differently by method, "
        "so the left chart compares what a step teaches and the right one what a second does. The training loss is the "
        "mean over the stamp and the end mark after it, so it starts elsewhere than the held-out loss.</p>",
        _task(),
        _again(results, seed, environment),
    ]
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>keyhole demo</title>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'><style>{_style()}</style></head>\n"
        f"<body><main>{chr(10).join(sections)}</main></body></html>\n"
    )


def _summary(results: list[Result]) -> str:
    done = [result for result in results if not result.skipped]
    text = "No method could run."
    if done:
        best = max(done, key=lambda result: result.accuracy_after)
        text = (
            f"{len(done)} ways to update all weights of one small model, each from the same start. Before training it "
            f"chooses the right stamp for {best.accuracy_before:.0%} of the held-out notes, a coin's 50%; "
            f"afterwards for up to {best.accuracy_after:.0%} ({escape(best.method)})."
        )
    return f"<header><h1>keyhole demo</h1><p class='lead'>{text}</p></header>"


def _table(results: list[Result]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in (COLUMNS[0], "", *COLUMNS[1:]))
    rows = []
    for i, result in enumerate(results):
        name, *values = cells(result)
        dot = f"<span class='dot b{i % len(COLOURS)}'></span>"
        if result.skipped:
            why = f"<td colspan='{len(values) + 1}' class='why'>skipped: {escape(result.skipped)}</td>"
            rows.append(f"<tr><th scope='row'>{dot}{escape(name)}</th>{why}</tr>")
            continue
        numbers = "".join(f"<td>{escape(value)}</td>" for value in values)
        rows.append(f"<tr><th scope='row'>{dot}{escape(name)}</th><td>{_bar(result, i)}</td>{numbers}</tr>")
    return (
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        "<p class='note'>Accuracy and loss are on held-out notes. Memory is the highest above what the process held "
        "before; moved is what crossed the link between host and GPU.</p>"
    )


def _bar(result: Result, index: int) -> str:
    """Accuracy from 0 to 100 %, with a mark where the model stood before."""
    before, after = 100 * result.accuracy_before, 100 * result.accuracy_after
    return (
        f"<span class='bar'><span class='fill b{index % len(COLOURS)}' style='width:{after:.1f}%'></span>"
        f"<span class='mark' style='left:{before:.1f}%'></span></span>"
    )


def _task() -> str:
    rows = [json.loads(line) for line in assets.TEST.read_text(encoding="utf-8").splitlines()[:EXAMPLES]]
    items = "".join(
        f"<tr><td class='left'>{escape(row['prompt'].partition(chr(10))[0])}</td>"
        f"<td class='left stamp{row['label']}'>{escape(row['completion'].strip())}</td></tr>"
        for row in rows
    )
    return (
        "<h2>The task</h2><p>Read a note in a guest book and choose the clerk's stamp: blue if the guest was "
        "pleased, red if not. The model has read about soups, rooms and concerts, and has seen stamps, but only "
        "ones that had nothing to do with the note: what a stamp means it has to learn here, from 1000 notes.</p>"
        f"<table class='task'><thead><tr><th>note</th><th>stamp</th></tr></thead><tbody>{items}</tbody></table>"
    )


def _again(results: list[Result], seed: int, environment: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{escape(r.method)}</th><td>{r.settings.steps}</td><td>{r.settings.batch_size}</td>"
        f"<td>{r.settings.lr:g}</td><td class='left'>{escape(_options(r.settings.options))}</td></tr>"
        for r in results
    )
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    gpus = ", ".join(gpu["name"] for gpu in environment["gpus"]) or "no GPU"
    cpu = environment["cpu"]
    machine = f"{cpu['name']}, {cpu['cores']} cores; {gpus}; {environment['os']}"
    return (
        "<h2>What was run</h2><table class='task'><thead><tr><th>method</th><th>steps</th><th>notes per step</th>"
        f"<th>learning rate</th><th>options</th></tr></thead><tbody>{rows}</tbody></table>"
        f"<p class='note'>Seed {seed}, float32, rate falling linearly to 0. {escape(machine)}.<br>"
        f"{escape(versions)}.</p><pre>keyhole demo                     this page again\n"
        "keyhole train demo-zo            one method, with checkpoints and all settings\n"
        "keyhole eval demo --tasks demo   the score of the model before training</pre>"
    )


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "-"


def _style() -> str:
    rules = [f".c{i}{{stroke:{c}}}.f{i}{{fill:{c}}}.b{i}{{background:{c}}}" for i, c in enumerate(COLOURS)]
    return STYLE + "".join(rules)


STYLE = """
:root{--ink:#1c2330;--soft:#5d6778;--line:#e3e7ee;--card:#fff;--page:#f5f7fa;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--ink:#e7ebf2;--soft:#9aa5b8;--line:#2c3442;--card:#181e28;--page:#10151d}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:40px 24px 56px}h1{font-size:30px;margin:0 0 6px;letter-spacing:-.02em}
h2{font-size:19px;margin:38px 0 10px}.lead{font-size:17px;max-width:74ch;margin:0 0 24px;color:var(--soft)}
p{max-width:84ch}.note{color:var(--soft);font-size:13px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;background:var(--card);border:1px solid var(--line);
border-radius:10px;overflow:hidden;font-variant-numeric:tabular-nums}
th,td{padding:9px 13px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
tbody tr:last-child>*{border-bottom:0}thead th{font-size:12px;font-weight:600;color:var(--soft)}
th:first-child,.left,.why,.task thead th:last-child{text-align:left}tbody th{font-weight:600}
.why{color:var(--soft);white-space:normal}.task{width:auto}.task .left{white-space:normal}
.task thead th:first-child{text-align:left}
.dot{display:inline-block;width:10px;height:10px;border-radius:50%;margin-right:9px}
.bar{display:block;position:relative;width:170px;height:10px;border-radius:5px;background:var(--line)}
.fill{display:block;height:100%;border-radius:5px}.mark{position:absolute;top:-4px;width:2px;height:18px;background:var(--ink)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:18px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 10px 8px}
svg{display:block;width:100%;height:auto}polyline{fill:none;stroke-linejoin:round}.line{stroke-width:2.4}
.raw{stroke-width:1;opacity:.22}.grid{stroke:var(--line)}.tick{fill:var(--soft);font-size:11px}
.axis{fill:var(--soft);font-size:12px}.name{font-size:12.5px;font-weight:600}
.stamp0{color:#3465d9;font-weight:600}.stamp1{color:#c23b4e;font-weight:600}
pre{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:13px 16px;overflow-x:auto;
font-size:13px}
"""
