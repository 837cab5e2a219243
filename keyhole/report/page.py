"""report.html: a run as one self-contained page, without scripts or external files.

From top to bottom: progress; curves over steps and over time; planned and measured numbers; where the time of a step
goes; the data, with trained tokens marked; the model's answers; decisions and their reasons; events; settings and
machine. During the run, a browser reloads the page automatically. All text from files is escaped.
"""

import datetime
from collections.abc import Callable
from html import escape

from keyhole.machine.text import duration
from keyhole.pages.chart import Series, chart, noisy
from keyhole.pages.frame import choice, header, page
from keyhole.report.curves import Curves
from keyhole.report.parts import STYLE, answers, data, decisions, environment, events, memory_and_pace
from keyhole.report.step_time import step_time
from keyhole.report.story import DONE, FAILED, RUNNING, STOPPED
from keyhole.report.view import View

REFRESH_S = 30
TRAIN, EVAL = 0, 1  # colours
EXACT = ("learning_rate",)  # is set, not measured: drawn as it is, without a running mean
SHOWN_FIRST = ("loss", "learning_rate", "tokens_per_second", "gpu_gib", "host_gib")
MOST_EXTRA = 6  # charts of a method's own numbers
LABELS = {"learning_rate": "learning rate", "tokens_per_second": "tokens per second", "grad_norm": "gradient norm"}
LABELS |= {"projected_grad": "projected gradient", "gpu_gib": "GPU memory, GiB", "host_gib": "host memory, GiB"}
PLAIN = ("loss", "perplexity", "nll")  # not in percent


def make_page(view: View) -> str:
    """The page."""
    story = view.story
    parts = [
        _top(view),
        _curves(view.curves, view.by_candidates),
        memory_and_pace(story, view.curves),
        step_time(story),
        data(story),
        answers(story),
        decisions(story),
        events(story),
        environment(view),
    ]
    return page(f"{view.title}: {view.name}", parts, STYLE, REFRESH_S if story.state == RUNNING else None)


def _top(view: View) -> str:
    story, curves = view.story, view.curves
    chips = [f"{view.name}/"]
    chips += [f"began {story.began}"] if story.began else []
    chips += [f"{curves.tokens:,} tokens"] if curves.tokens else []
    chips += [f"{curves.pace:,.0f} tokens/s"] if curves.pace else []
    chips += [f"{curves.step_seconds:.3g} s per step"] if curves.step_seconds else []
    for name, where in (("gpu_gib", "GPU"), ("host_gib", "host")):
        chips += [f"{curves.highest[name]:.2f} GiB {where} peak"] if name in curves.highest else []
    share = 100 * min(1.0, curves.last_step / story.total) if story.total else 0.0
    bar = f"<span class='progress'><span style='width:{share:.1f}%'></span></span>" if story.state == RUNNING else ""
    return header("keyhole train", view.title, lead(view), chips) + bar


def lead(view: View) -> str:
    """The progress of the run, in a sentence or two, as HTML."""
    story, curves = view.story, view.curves
    place = f"step {curves.last_step:,} of {story.total:,}" if story.total else f"step {curves.last_step:,}"
    seconds = curves.step_seconds
    if story.state == RUNNING:
        left = f", {duration(seconds * (story.total - curves.last_step))} left" if seconds and story.total else ""
        said = f"<b>Running</b>: {place}{left} (as of {escape(story.updated)})."
    elif story.state in (DONE, ""):
        said = f"<b>{'Done' if story.state else 'Read'}</b>: {curves.last_step:,} steps in {duration(curves.seconds)}."
    else:
        word = {STOPPED: "Stopped", FAILED: "Failed"}.get(story.state, story.state)
        said = f"<b>{escape(word)}</b> at {place}."
    if story.outcome:
        said += f" {escape(story.outcome)}"
    if curves.losses:
        (first, before), (last, after) = curves.losses[0], curves.losses[-1]
        said += f" Loss{' over candidates' if view.by_candidates else ''} <b>{before:.4f}</b> at step {first:,}"
        said += f", <b>{after:.4f}</b> at step {last:,}." if last > first else "."
    for kind, word in (("eval", "Dev"), ("test", "Test")):
        numbers = shown_metrics(curves.last(kind), kind)
        if kind == "test" and curves.last_step > (step := curves.result(kind)[0]) > 0:
            word = f"Test of step {step:,}"
        if view.by_candidates and numbers.startswith("loss "):
            numbers = numbers.replace("loss", "loss per token", 1)
        said += f" {word}: <b>{escape(numbers)}</b>." if numbers else ""
    return said


def shown_metrics(numbers: dict[str, float], kind: str) -> str:
    """`loss 0.4312, accuracy 91.2`; of many metrics only the first, and the mean over several tasks before theirs."""
    own = {name.removeprefix(f"{kind}_"): value for name, value in numbers.items() if name.startswith(f"{kind}_")}
    kept = [(name, value) for name, value in own.items() if name not in ("tokens", "rows", "questions")]
    if len(kept) > 4:  # the mean is called score, or like the metric that all tasks have
        means = [each for each in kept[1:] if each[0] == "score" or any(other.endswith(f"_{each[0]}") for other in own)]
        kept = [*kept[:1], *means, *(each for each in kept[1:] if each not in means)]
    return ", ".join(
        f"{name} {value:.4f}" if is_plain(name) else f"{name} {100 * value:.1f}" for name, value in kept[:4]
    )


def is_plain(name: str) -> bool:
    """Whether a metric is shown unchanged, not in percent."""
    return name.endswith(PLAIN)


def unit_of(seconds: float) -> tuple[float, str]:
    """Seconds per unit, and the unit's name, for an axis of this length."""
    return next((size, name) for most, size, name in UNITS if seconds < most)


UNITS = ((180.0, 1.0, "seconds"), (3 * 3600.0, 60.0, "minutes"), (float("inf"), 3600.0, "hours"))


def _curves(curves: Curves, by_candidates: bool) -> str:
    if not curves.points:
        return "<section><h2>Curves</h2><p class='note'>No step is done yet.</p></section>"
    panels = []
    size, unit = unit_of(curves.seconds)
    for label, over_time in (("over steps", False), ("over time", True)):
        scale = (lambda x: [value / size for value in x]) if over_time else (lambda x: x)
        along = f"{unit} of training" if over_time else "step"
        panels.append((label, _charts(curves, over_time, scale, along, by_candidates)))
    width = "" if curves.width == 1 else f" A point stands for {curves.width} steps."
    return (
        f"<section><h2>Curves</h2>{choice('along', panels)}<p class='note'>Faint: as measured. Strong: running mean "
        f"(the learning rate: as set).{width} Time is that of the training steps, without evaluations and "
        "saves.</p></section>"
    )


def _charts(
    curves: Curves, over_time: bool, scale: Callable[[list[float]], list[float]], along: str, by_candidates: bool
) -> str:
    def line(name: str, label: str) -> Series:
        x, y = curves.mean(name, over_time)
        return Series(label, TRAIN, scale(x), y) if name in EXACT else noisy(label, TRAIN, scale(x), y)

    evaluated = curves.evaluation("eval_loss", over_time)
    loss = [line("loss", "train" if evaluated[0] else "")]
    held_out = [Series("eval", EVAL, scale(evaluated[0]), evaluated[1], dots=True)] if evaluated[0] else []
    if by_candidates:  # two quantities: cross-entropy per question, and NLL per token of the right answers
        figures = [chart(loss, f"loss over candidates by {along}", along, "loss over candidates")]
        figures += [chart(held_out, f"loss per token by {along}", along, "loss per token")] if held_out else []
    else:
        figures = [chart(loss + held_out, f"loss by {along}", along, "loss")]
    figures += _metric_charts(curves, over_time, scale, along)
    extra = [name for name in curves.names if name not in SHOWN_FIRST][:MOST_EXTRA]
    for name in ("learning_rate", *extra, "tokens_per_second", "gpu_gib", "host_gib"):
        if name in curves.names:
            label = LABELS.get(name, name.replace("_", " "))
            figures.append(chart([line(name, "")], f"{label} by {along}", along, label[:40]))
    return "<div class='charts'>" + "".join(f"<figure>{each}</figure>" for each in figures) + "</div>"


def _metric_charts(
    curves: Curves, over_time: bool, scale: Callable[[list[float]], list[float]], along: str
) -> list[str]:
    """Metrics of the dev questions: those in percent on one chart, the others on another."""
    left_out = {"eval_loss", "eval_tokens", "eval_rows", "eval_questions", "perplexity"}
    names = [name for name in curves.evaluated if name not in left_out][:24]
    drawn = []
    for plain in (False, True):
        lines: list[Series] = []
        for name in (name for name in names if is_plain(name) is plain):
            x, y = curves.evaluation(name, over_time)
            y = y if plain else [100 * value for value in y]
            lines.append(Series(name.removeprefix("eval_"), len(lines) % 12, scale(x), y, dots=True))
        if lines:
            drawn.append(chart(lines, f"dev metrics by {along}", along, "dev" if plain else "dev, times 100"))
    return drawn


def now() -> str:
    """The current time, for `began` and `updated`."""
    return datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
