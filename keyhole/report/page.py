"""report.html: a run as one self-contained page, without scripts or external files.

From top to bottom: progress; curves over steps and over time; planned and measured numbers; where the time of a step
goes; the data, with trained tokens marked; the model's answers; decisions and their reasons; events; settings and
machine. During the run, a browser reloads the page automatically. All text from files is escaped.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from keyhole.machine.text import duration
from keyhole.pages.chart import Series, chart, noisy
from keyhole.pages.frame import charts, choice, header, page, section
from keyhole.report.curves import Curves
from keyhole.report.parts import STYLE, answers, data, decisions, environment, events, memory_and_pace
from keyhole.report.story import DONE, RUNNING, View

REFRESH_S = 30
TRAIN, EVAL = 0, 1  # colours
EXACT = ("learning_rate",)  # is set, not measured: drawn as it is, without a running mean
SHOWN_FIRST = ("loss", "learning_rate", "tokens_per_second", "gpu_gib", "host_gib")
MOST_EXTRA = 6  # charts of a method's own numbers
LABELS = {
    "learning_rate": "learning rate", "tokens_per_second": "tokens per second", "grad_norm": "gradient norm",
    "projected_grad": "projected gradient", "gpu_gib": "GPU memory, GiB", "host_gib": "host memory, GiB",
}  # fmt: skip
PLAIN = ("loss", "perplexity", "nll")  # not in percent


def make_page(view: View) -> str:
    story = view.story
    parts = [
        _top(view),
        _curves(view.curves, view.by_candidates),
        memory_and_pace(story, view.curves),
        data(story),
        answers(story),
        decisions(story),
        events(story),
        environment(view),
    ]
    return page(f"{view.title}: {view.name}", parts, STYLE, REFRESH_S if story.state == RUNNING else None)


def _top(view: View) -> str:
    story, curves = view.story, view.curves
    peaks = {where: curves.highest.get(name) for name, where in (("gpu_gib", "GPU"), ("host_gib", "host"))}
    told = [
        (story.began, f"began {story.began}"),
        (curves.tokens, f"{curves.tokens:,} tokens"),
        (curves.pace, f"{curves.pace or 0:,.0f} tokens/s"),
        (curves.step_seconds, f"{curves.step_seconds or 0:.3g} s per step"),
        *((peak is not None, f"{peak or 0:.2f} GiB {where} peak") for where, peak in peaks.items()),
    ]
    chips = [f"{view.name}/", *(chip for holds, chip in told if holds)]
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
        said = f"<b>{escape(story.state.capitalize())}</b> at {place}."
    if story.outcome:
        said += f" {escape(story.outcome)}"
    if curves.losses:
        (first, before), (last, after) = curves.losses[0], curves.losses[-1]
        said += f" Loss{' over candidates' if view.by_candidates else ''} <b>{before:.4f}</b> at step {first:,}"
        said += f", <b>{after:.4f}</b> at step {last:,}." if last > first else "."
    for kind, word in (("eval", "Dev"), ("test", "Test")):
        step, found = curves.result(kind)
        numbers, of_step = shown_metrics(found, kind), f" of step {step:,}" if curves.last_step > step > 0 else ""
        if view.by_candidates and numbers.startswith("loss "):
            numbers = numbers.replace("loss", "loss per token", 1)
        said += f" {word}{of_step}: <b>{escape(numbers)}</b>." if numbers else ""
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
    return name.endswith(PLAIN)


UNITS = ((180.0, 1.0, "seconds"), (3 * 3600.0, 60.0, "minutes"), (float("inf"), 3600.0, "hours"))


@dataclass(frozen=True)
class Along:
    """What charts have to the right: steps, or time in a unit of so many seconds."""

    choice: str
    label: str
    unit_s: float | None = None

    def of_steps(self, curves: Curves, number: str, name: str, colour: int) -> list[Series]:
        """The curve of a number of steps; none if no step has it."""
        x, y = curves.mean(number, self.unit_s is not None)
        return [(Series if number in EXACT else noisy)(name, colour, self._scaled(x), y)] if x else []

    def of_evaluations(self, curves: Curves, number: str, name: str, colour: int) -> list[Series]:
        """The curve of a number of evaluations; none if no evaluation has it."""
        x, y = curves.evaluation(number, self.unit_s is not None)
        y = y if is_plain(number) else [100 * value for value in y]
        return [Series(name, colour, self._scaled(x), y, dots=True)] if x else []

    def _scaled(self, x: list[float]) -> list[float]:
        return x if self.unit_s is None else [value / self.unit_s for value in x]


def both_ways(curves: Sequence[Curves]) -> list[Along]:
    """Over steps, and over time in a unit that suits the longest of the runs."""
    seconds = max((each.seconds for each in curves), default=0.0)
    size, unit = next((size, name) for most, size, name in UNITS if seconds < most)
    return [Along("over steps", "step"), Along("over time", f"{unit} of training", size)]


def _curves(curves: Curves, by_candidates: bool) -> str:
    if not curves.points:
        return section("Curves", "<p class='note'>No step is done yet.</p>")
    panels = [(along.choice, _charts(curves, along, by_candidates)) for along in both_ways([curves])]
    width = "" if curves.width == 1 else f" A point stands for {curves.width} steps."
    return section(
        "Curves",
        choice("along", panels),
        f"Faint: as measured. Strong: running mean (the learning rate: as set).{width} Time is that of the training "
        "steps, without evaluations and saves.",
    )


def _charts(curves: Curves, along: Along, by_candidates: bool) -> str:
    held_out = along.of_evaluations(curves, "eval_loss", "eval", EVAL)
    loss = along.of_steps(curves, "loss", "train" if held_out else "", TRAIN)
    drawn: list[tuple[str, list[Series], str]]
    if by_candidates:  # two quantities: cross-entropy per question, and NLL per token of the right answers
        drawn = [("loss over candidates", loss, "loss over candidates")]
        drawn += [("loss per token", held_out, "loss per token")] if held_out else []
    else:
        drawn = [("loss", loss + held_out, "loss")]
    left_out = {"eval_loss", "eval_tokens", "eval_rows", "eval_questions", "perplexity"}
    names = [name for name in curves.evaluated if name not in left_out][:24]
    for plain in (False, True):  # those in percent on one chart, the others on another
        own = [name for name in names if is_plain(name) is plain]
        found = [along.of_evaluations(curves, n, n.removeprefix("eval_"), i % 12) for i, n in enumerate(own)]
        drawn += [("dev metrics", sum(found, []), "dev" if plain else "dev, times 100")] if own else []
    extra = [name for name in curves.names if name not in SHOWN_FIRST][:MOST_EXTRA]
    for name in ("learning_rate", *extra, "tokens_per_second", "gpu_gib", "host_gib"):
        if name in curves.names:
            label = LABELS.get(name, name.replace("_", " "))
            drawn.append((label, along.of_steps(curves, name, "", TRAIN), label[:40]))
    return charts(chart(lines, f"{title} by {along.label}", along.label, label) for title, lines, label in drawn)


def now() -> str:
    return datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
