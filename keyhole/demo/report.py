"""The demo's HTML page: one self-contained file, without scripts or external files.

From top to bottom: a summary in two sentences, the table, the same run in a budget smaller than the model, the
curves by step and by second, the task with examples, and everything needed to run it again (settings, seed, versions,
commands). It follows the reader's light or dark theme.
"""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from keyhole import assets
from keyhole.demo.budget import Squeezed
from keyhole.demo.train import Result
from keyhole.machine.sizes import GIB, MIB
from keyhole.pages.chart import Series, chart, noisy
from keyhole.pages.frame import COLOURS, header, machine_text, page

COLUMNS = ("method", "steps", "accuracy", "held-out loss", "seconds", "host memory", "GPU memory", "moved")
EXAMPLES = 4


def size(count: int) -> str:
    """Bytes as readable text; a dash for none."""
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


def make_report(
    results: list[Result], seed: int, environment: dict[str, Any], squeezed: Sequence[Squeezed] = ()
) -> str:
    """The page. squeezed: the runs within a budget smaller than the model."""
    done = [(i % len(COLOURS), r) for i, r in enumerate(results) if not r.skipped]
    steps = [noisy(r.method, i, [n + 1.0 for n in range(len(r.losses))], r.losses) for i, r in done]
    seconds = [noisy(r.method, i, r.times_s, r.losses) for i, r in done]
    sections = [
        _summary(results),
        _table(results),
        _budget(squeezed),
        f"<section><h2>Loss curves</h2><div class='charts'>{_figure(steps, 'step')}{_figure(seconds, 'seconds')}</div>"
        "<p class='note'>Faint: each step as measured. Strong: running mean. A step costs differently by method, "
        "so one chart compares what a step teaches and the other what a second does. The training loss is the "
        "mean over the stamp and the end mark after it, so it starts elsewhere than the held-out loss.</p></section>",
        _task(),
        _again(results, seed, environment),
    ]
    return page("keyhole demo", sections, STYLE)


def _figure(lines: list[Series], along: str) -> str:
    return f"<figure>{chart(lines, f'loss by {along}', along, 'training loss')}</figure>"


def _summary(results: list[Result]) -> str:
    done = [result for result in results if not result.skipped]
    text = "No method could run."
    if done:
        best = max(done, key=lambda result: result.accuracy_after)
        text = (
            f"{len(done)} ways to train one small model, each from the same start. Before training it "
            f"chooses the right stamp for {best.accuracy_before:.0%} of the held-out notes, a coin's 50%; "
            f"afterwards for up to {best.accuracy_after:.0%} ({escape(best.method)})."
        )
    return header("keyhole demo", "Every method on one small model", text, ())


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
    """Accuracy from 0 to 100 %, with a mark at the accuracy before training."""
    before, after = 100 * result.accuracy_before, 100 * result.accuracy_after
    return (
        f"<span class='wide'><span class='fill b{index % len(COLOURS)}' style='width:{after:.1f}%'></span>"
        f"<span class='mark' style='left:{before:.1f}%'></span></span>"
    )


def squeezed_line(found: Squeezed) -> str:
    """`lomo in 4.9 MiB, a model of 9.7 MiB: losses and weights are the same bits; 48.0 MiB crossed up, 27.4 down`."""
    sizes = f"{found.method} in {size(found.budget_bytes)}, a model of {size(found.weights_bytes)}"
    if found.skipped:
        return f"{sizes}: skipped: {found.skipped}"
    crossed = f"{size(found.up_bytes)} crossed the link up, {size(found.down_bytes)} down"
    return f"{sizes}: {verdict(found)}; {crossed} in {len(found.losses)} steps"


def verdict(found: Squeezed) -> str:
    """Whether the run within the budget equals the one without."""
    if found.same_losses and found.same_weights:
        return "losses and weights are the same bits as with all weights on the device"
    return "NOT the same as with all weights on the device: " + (
        "the weights differ" if found.same_losses else "the losses differ"
    )


def _budget(squeezed: Sequence[Squeezed]) -> str:
    """The model and the budget as bars, and what was compared."""
    if not squeezed:
        return ""
    rows = []
    for found in squeezed:
        name = f"<th scope='row'>{escape(found.method)}</th>"
        if found.skipped:
            rows.append(f"<tr>{name}<td colspan='6' class='why'>skipped: {escape(found.skipped[:400])}</td></tr>")
            continue
        share = 100 * found.budget_bytes / max(1, found.weights_bytes)
        bar = f"<span class='wide'><span class='fill b0' style='width:{share:.1f}%'></span></span>"
        same = "same" if found.same_losses and found.same_weights else "no"
        mark = f"<td class='{same} left'>{escape(verdict(found))}</td>"
        numbers = (found.weights_bytes, found.budget_bytes, found.up_bytes, found.down_bytes)
        cells = "".join(f"<td>{size(number)}</td>" for number in numbers)
        rows.append(f"<tr>{name}<td>{bar}</td>{cells}{mark}</tr>")
    head = "".join(f"<th>{escape(column)}</th>" for column in ("method", "", "model", "budget", "up", "down"))
    return (
        "<section><h2>In a budget smaller than the model</h2><p>A deeper model with random weights, trained for "
        f"{max(len(found.losses) for found in squeezed)} steps with all weights on the device, and again in a budget "
        "that has to hold everything: weights in use, activations, logits, buffers. The rest of the weights waits in "
        "host memory and crosses the link when it is needed.</p><div class='scroll'><table class='small'><thead><tr>"
        f"{head}<th class='left'>compared, bit by bit</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        "<p class='note'>Bar: the budget as a share of the weights. Up, down: bytes that crossed the link in all "
        "steps. Where there is no GPU, copies within host memory stand for the link.</p></section>"
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
        "<div class='scroll'><table class='task small'><thead><tr><th>note</th><th class='left'>stamp</th></tr></thead>"
        f"<tbody>{items}</tbody></table></div>"
    )


def _again(results: list[Result], seed: int, environment: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{escape(r.method)}</th><td>{r.settings.steps}</td><td>{r.settings.batch_size}</td>"
        f"<td>{r.settings.lr:g}</td><td class='left'>{escape(_options(r.settings.options))}</td></tr>"
        for r in results
    )
    return (
        "<h2>What was run</h2><div class='scroll'><table class='task small'><thead><tr><th>method</th><th>steps</th>"
        "<th>notes per step</th>"
        f"<th>learning rate</th><th class='left'>options</th></tr></thead><tbody>{rows}</tbody></table></div>"
        f"<p class='note'>Seed {seed}, float32, rate falling linearly to 0.</p>{machine_text(environment)}"
        "<pre>keyhole demo                     this page again\n"
        "keyhole train demo-zo            one method, with checkpoints and all settings\n"
        "keyhole eval demo --tasks demo   the score of the model before training</pre>"
    )


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "-"


STYLE = """
.why{text-align:left;color:var(--soft);white-space:normal}.task .left{white-space:normal}
.wide{display:block;position:relative;width:170px;height:10px;border-radius:5px;background:var(--line)}
.fill{display:block;height:100%;border-radius:5px}
.mark{position:absolute;top:-4px;width:2px;height:18px;background:var(--ink)}
.same{color:#14957d;font-weight:600}.no{color:#cc3f55;font-weight:700}
.stamp0{color:#3b6fe0;font-weight:600}.stamp1{color:#cc3f55;font-weight:600}
"""
