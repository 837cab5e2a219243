"""The demo's HTML page: one self-contained file, without scripts or external files.

From top to bottom: a summary in two sentences, the table, the same run in a budget smaller than the model, the
curves by step and by second, the task with examples, and everything needed to run it again (settings, seed, versions,
commands). It follows the reader's light or dark theme.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from keyhole import assets
from keyhole.machine.sizes import GIB, MIB
from keyhole.pages.chart import chart, noisy
from keyhole.pages.frame import COLOURS, bar, charts, header, machine_text, page, section, table, td, th, tr

COLUMNS = ("method", "steps", "accuracy", "held-out loss", "seconds", "host memory", "GPU memory", "moved")
EXAMPLES = 4


@dataclass(frozen=True)
class Demo:
    steps: int = 100
    lr: float = 1e-3
    batch_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """The result of one method. `skipped` says why it could not run; the numbers are then meaningless."""

    method: str
    settings: Demo
    skipped: str = ""
    accuracy_before: float = 0.0
    accuracy_after: float = 0.0
    loss_before: float = 0.0
    loss_after: float = 0.0
    host_bytes: int = 0
    gpu_bytes: int = 0
    moved_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.times_s[-1] if self.times_s else 0.0


@dataclass
class Squeezed:
    """The result of one method. skipped: why it could not run."""

    method: str
    skipped: str = ""
    weights_bytes: int = 0
    budget_bytes: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    same_losses: bool = False
    same_weights: bool = False


def size(count: int) -> str:
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


def line_of(result: Result) -> str:
    if result.skipped:
        return f"{result.method}: skipped: {result.skipped}"
    accuracy = f"accuracy {result.accuracy_before:.1%} -> {result.accuracy_after:.1%}"
    return f"{result.method}: {result.settings.steps} steps in {result.seconds:.1f} s, {accuracy}"


def make_report(
    results: list[Result], seed: int, environment: Mapping[str, Any], squeezed: Sequence[Squeezed] = ()
) -> str:
    """The page. squeezed: the runs within a budget smaller than the model."""
    done = [(i % len(COLOURS), result) for i, result in enumerate(results) if not result.skipped]
    lead = "No method could run."
    if done:
        best = max((result for _, result in done), key=lambda result: result.accuracy_after)
        lead = (
            f"{len(done)} ways to train one small model, each from the same start. Before training it chooses the "
            f"right stamp for {best.accuracy_before:.0%} of the held-out notes, a coin's 50%; afterwards for up to "
            f"{best.accuracy_after:.0%} ({escape(best.method)})."
        )
    by_step = [noisy(r.method, i, [n + 1.0 for n in range(len(r.losses))], r.losses) for i, r in done]
    by_second = [noisy(r.method, i, r.times_s, r.losses) for i, r in done]
    rows = []
    for name, used in ((result.method, result.settings) for result in results):
        options = ", ".join(f"{key}={value}" for key, value in used.options.items()) or "-"
        rows.append(tr(name, [*map(td, (f"{used.steps}", f"{used.batch_size}", f"{used.lr:g}")), td(options, "left")]))
    parts = [
        header("keyhole demo", "Every method on one small model", lead, ()),
        _table(results),
        _budget(squeezed),
        section(
            "Loss curves",
            charts(
                [
                    chart(by_step, "loss by step", "step", "training loss"),
                    chart(by_second, "loss by seconds", "seconds", "training loss"),
                ]
            ),
            "Faint: each step as measured. Strong: running mean. A step costs differently by method, so one chart "
            "compares what a step teaches and the other what a second does. The training loss is the mean over the "
            "stamp and the end mark after it, so it starts elsewhere than the held-out loss.",
        ),
        _task(),
        section("What was run", table(RUN_HEAD, rows, "task small") + AGAIN.format(seed, machine_text(environment))),
    ]
    return page("keyhole demo", parts, STYLE)


def _table(results: list[Result]) -> str:
    rows = []
    for i, result in enumerate(results):
        colour, (name, *values) = i % len(COLOURS), cells(result)
        mark = f"<span class='mark' style='left:{100 * result.accuracy_before:.1f}%'></span>"  # before training
        line = [bar(colour, 100 * result.accuracy_after, mark), *map(td, values)]
        why = f"<td colspan='{len(values) + 1}' class='why'>skipped: {escape(result.skipped)}</td>"
        rows.append(tr(name, [why] if result.skipped else line, colour))
    return table(map(th, (COLUMNS[0], "", *COLUMNS[1:])), rows, "") + (
        "<p class='note'>Accuracy and loss are on held-out notes. Memory is the highest above what the process held "
        "before; moved is what crossed the link between host and GPU.</p>"
    )


def squeezed_line(found: Squeezed) -> str:
    """`lomo in 4.9 MiB, a model of 9.7 MiB: losses and weights are the same bits; 48.0 MiB crossed up, 27.4 down`."""
    crossed = f"{size(found.up_bytes)} crossed the link up, {size(found.down_bytes)} down in {len(found.losses)} steps"
    said = f"skipped: {found.skipped}" if found.skipped else f"{verdict(found)}; {crossed}"
    return f"{found.method} in {size(found.budget_bytes)}, a model of {size(found.weights_bytes)}: {said}"


def verdict(found: Squeezed) -> str:
    if found.same_losses and found.same_weights:
        return "losses and weights are the same bits as with all weights on the device"
    return "NOT the same as with all weights on the device: " + (
        "the weights differ" if found.same_losses else "the losses differ"
    )


def _budget(squeezed: Sequence[Squeezed]) -> str:
    """The model and the budget as bars, and what was compared."""
    rows = []
    for found in squeezed:
        share = 100 * found.budget_bytes / max(1, found.weights_bytes)
        numbers = (found.weights_bytes, found.budget_bytes, found.up_bytes, found.down_bytes)
        same = "same" if found.same_losses and found.same_weights else "no"
        line = [bar(0, share), *(td(size(number)) for number in numbers), td(verdict(found), f"{same} left")]
        why = f"<td colspan='6' class='why'>skipped: {escape(found.skipped[:400])}</td>"
        rows.append(tr(found.method, [why] if found.skipped else line))
    head = [*map(th, ("method", "", "model", "budget", "up", "down")), th("compared, bit by bit", "left")]
    steps = max((len(found.losses) for found in squeezed), default=0)
    about = (
        f"<p>A deeper model with random weights, trained for {steps} steps with all weights on the device, and again "
        "in a budget that has to hold everything: weights in use, activations, logits, buffers. The rest of the "
        "weights waits in host memory and crosses the link when it is needed.</p>"
    )
    return section(
        "In a budget smaller than the model",
        about + table(head, rows) if rows else "",
        "Bar: the budget as a share of the weights. Up, down: bytes that crossed the link in all steps. Where there "
        "is no GPU, copies within host memory stand for the link.",
    )


def _task() -> str:
    rows = [json.loads(line) for line in assets.TEST.read_text(encoding="utf-8").splitlines()[:EXAMPLES]]
    lines = [
        f"<tr>{td(row['prompt'].partition(chr(10))[0], 'left')}"
        f"{td(row['completion'].strip(), 'left stamp' + str(row['label']))}</tr>"
        for row in rows
    ]
    about = (
        "<p>Read a note in a guest book and choose the clerk's stamp: blue if the guest was pleased, red if not. The "
        "model has read about soups, rooms and concerts, and has seen stamps, but only ones that had nothing to do "
        "with the note: what a stamp means it has to learn here, from 1000 notes.</p>"
    )
    return section("The task", about + table([th("note"), th("stamp", "left")], lines, "task small"))


RUN_HEAD = (*map(th, ("method", "steps", "notes per step", "learning rate")), th("options", "left"))
AGAIN = """<p class='note'>Seed {}, float32, rate falling linearly to 0.</p>{}<pre>\
keyhole demo                     this page again
keyhole train demo-zo            one method, with checkpoints and all settings
keyhole eval demo --tasks demo   the score of the model before training</pre>"""
STYLE = """
.why{text-align:left;color:var(--soft);white-space:normal}.task .left{white-space:normal}
.wide{display:block;position:relative;width:170px;height:10px;border-radius:5px;background:var(--line)}
.fill{display:block;height:100%;border-radius:5px}
.mark{position:absolute;top:-4px;width:2px;height:18px;background:var(--ink)}
.same{color:#14957d;font-weight:600}.no{color:#cc3f55;font-weight:700}
.stamp0{color:#3b6fe0;font-weight:600}.stamp1{color:#cc3f55;font-weight:600}
"""
