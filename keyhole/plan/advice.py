"""Which row of the table to choose, and why.

Rows that fit are compared by the hours to learn as much as AdamW learns in the given number of steps:

    hours = seconds per step x steps x (steps that the method needs for one of AdamW)

The last factor is the method's own (`steps` of its row): a rule of thumb, since no formula knows the task. Methods that
train all parameters come first: adapters are recommended only if nothing else fits. Of the rows within NEAR of the
fastest, the one with the least GPU memory is chosen, since it leaves room for longer samples. A row that `keyhole
train` would refuse for this number of steps (fp8, whose rounding noise accumulates) is chosen only if nothing else
fits.

Which changes would make a run fit, cheapest first.

Each candidate is planned like any row (plan/table.py), and those that fit are ordered by their cost:

    0   only time: placement=auto or stream, block inputs in host memory, more and smaller micro-batches
    1   another storage format of the weights: a smaller wire, a 16-bit dtype
    2   what is learned: fewer tokens per sample, settings listed in the method's row, another method

and within each kind by seconds per step. A number is lowered as little as possible: it is halved until the run fits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from keyhole.machine.host import host_memory
from keyhole.machine.sizes import about
from keyhole.methods import METHODS
from keyhole.methods.traits import Traits
from keyhole.methods.workload import Workload
from keyhole.model.weights.format import Wire, bytes_per_element
from keyhole.plan.measure import known
from keyhole.plan.seconds import PROFILES
from keyhole.plan.table import Question, Row, plan_row

NEAR = 1.05
COUNT = 3
SHORTEST = 32  # tokens


def recommended(rows: Sequence[Row]) -> Row | None:
    """The recommended row; None if none fits."""
    fitting = _to_choose_from(rows)
    fitting = [row for row in fitting if row.full] or fitting
    if not fitting:
        return None
    least = min(row.hours for row in fitting)
    near = [row for row in fitting if row.hours <= NEAR * least]
    return min(near, key=lambda row: (row.gpu_bytes, row.hours))


def _to_choose_from(rows: Sequence[Row]) -> list[Row]:
    """Rows that fit and would not be refused; if there are none, all rows that fit."""
    return [row for row in rows if row.fits and not row.refused] or [row for row in rows if row.fits]


def settings_of(row: Row, question: Question) -> str:
    """The settings of the row, as arguments of `keyhole train`."""
    words = [f"method={row.method}", f"placement={row.placement}"]
    if row.placement == "auto" and question.gpu_bytes is not None:
        words.append(f"gpu_memory={about(question.gpu_bytes)}")
    return " ".join(words + ([f"wire={row.wire}"] if row.wire else []))


def reason(row: Row, rows: Sequence[Row], question: Question) -> str:
    """The reason for the choice, in one sentence."""
    rows = _to_choose_from(rows)
    fitting = len(rows)
    if not row.full:
        return f"nothing that trains all parameters fits; {row.method} trains adapters beside them"
    fastest = min((other for other in rows if other.full), key=lambda other: other.hours)
    count = f"the {fitting} rows that fit" if fitting != 1 else "the one row that fits"
    learns = f"learns what {question.steps:,.0f} steps of AdamW learn in {row.hours:.2g} h"
    if fastest is row:
        others = [other for other in rows if other.full and other.method != row.method]
        next_best = min(others, key=lambda other: other.hours, default=None)
        against = "" if next_best is None else f" (next {next_best.method}, {next_best.hours:.2g} h)"
        which = f"the fastest of {count}" if fitting != 1 else count
        return f"{which}: {learns}{against}; bound by {row.bound_by}"
    near = f"{fastest.method} {fastest.placement}, {fastest.hours:.2g} h, {about(fastest.gpu_bytes)}"
    nearly = f"within {NEAR - 1:.0%} of the fastest of {count} ({near})"
    return f"{learns}, {nearly}, with less GPU memory; bound by {row.bound_by}"


@dataclass(frozen=True)
class Change:
    """Settings with which the run fits, and their cost."""

    settings: str
    row: Row
    kind: int

    def __str__(self) -> str:
        gib = 2**30
        return (
            f"{self.settings}: {self.row.gpu_bytes / gib:.1f} GiB of GPU memory, {self.row.host_bytes / gib:.1f} GiB "
            f"of host memory, {self.row.step_seconds:.3g} s per step"
        )


def cheapest_changes(
    question: Question, method: str, placement: str, wire: str | None = None, count: int = COUNT
) -> list[Change]:
    """At most `count` changes that make this method fit, or another one."""
    traits, found = METHODS[method], list[Change]()
    for kind, settings, changed, other, where, form in _candidates(question, traits, placement, wire):
        row = plan_row(changed, other, where, form)
        if row is not None and row.fits:
            found.append(Change(settings, row, kind))
    found.sort(key=lambda change: (change.kind, change.row.step_seconds))
    return _apart(found)[:count]


def _apart(found: list[Change]) -> list[Change]:
    """The first change of each setting, regardless of its value."""
    kept: dict[str, Change] = {}
    for change in found:
        key, _, value = change.settings.partition("=")
        kept.setdefault(f"{key} {value.split()[0]}" if key == "method" else key, change)
    return list(kept.values())


Candidate = tuple[int, str, Question, Traits, str, str | None]


def _candidates(question: Question, traits: Traits, placement: str, wire: str | None) -> Iterator[Candidate]:
    places = ("auto", "stream") if traits.streams else ("resident",)
    for where in places:
        if where != placement:
            yield 0, f"placement={where}", question, traits, where, wire
    for at in dict.fromkeys((placement, *places) if placement in places else places):
        shown = "" if at == placement else f" placement={at}"
        own = list(_own_changes(question, traits))
        for settings, changed in own:
            yield 0, settings + shown, changed, traits, at, wire
        for settings, changed in (("", question), *own):
            smaller = _halved(changed, traits, at, wire)
            if smaller is not None:
                text = f"batch_size={smaller.batch} gradient_accumulation_steps={smaller.accumulation}"
                yield 0, f"{text} {settings}".rstrip() + shown, smaller, traits, at, wire
                break
        width = question.dtype.itemsize if wire is None else bytes_per_element(wire)
        for form in traits.all_wires(question.settings.get(traits.name) or traits.settings()):
            if bytes_per_element(form) < width:
                yield 1, f"wire={form}{shown}", question, traits, at, form
        if question.dtype == torch.float32 and wire is None:
            yield 1, f"dtype=bfloat16{shown}", replace(question, dtype=torch.bfloat16), traits, at, None
        length = question.length
        while length > SHORTEST:
            length //= 2
            shorter = replace(question, length=length)
            if _fits(shorter, traits, at, wire):
                yield 2, f"max_length={length}{shown}", shorter, traits, at, wire
                break
    for other in METHODS.values():
        if other.name != traits.name and not other.keeps_base:
            for at in ("resident", "auto", "stream") if other.streams else ("resident",):
                shown = "" if at == placement else f" placement={at}"
                yield 2, f"method={other.name}{shown}", question, other, at, None


def _halved(question: Question, traits: Traits, placement: str, wire: str | None) -> Question | None:
    """The same step in smaller micro-batches: the largest that fit."""
    while question.batch > 1:
        question = replace(question, batch=-(-question.batch // 2), accumulation=2 * question.accumulation)
        if _fits(question, traits, placement, wire):
            return question
    return None


def _fits(question: Question, traits: Traits, placement: str, wire: str | None) -> bool:
    row = plan_row(question, traits, placement, wire)
    return row is not None and row.fits


def _own_changes(question: Question, traits: Traits) -> Iterator[tuple[str, Question]]:
    """Settings of the method that need less memory, according to its row."""
    own = question.settings.get(traits.name) or traits.settings()
    for text in (*own.advice.change, *(f"{key}=1" for key in own.advice.lower)):
        key, _, value = text.partition("=")
        name = key.rpartition(".")[2]
        changed = type(own)(**vars(own) | {name: int(value) if value.isdecimal() else value})
        yield text, replace(question, settings={**question.settings, traits.name: changed})


def said(
    module: nn.Module, placement: str, gpu_bytes: int | None, formats: Wire, device: torch.device, work: Workload
) -> str:
    """For a refusal: the cheapest changes, one per line; "" if no change is known to fit, or nothing is trained.
    Seconds are left out if this machine's rates are not known."""
    if work.method not in METHODS:
        return ""
    rates = known(device)
    guess = rates or next(iter(PROFILES.values()))
    cuda = device.type == "cuda"
    row = METHODS[work.method]
    own = work.settings or row.settings()
    length = work.length or work.tokens
    question = Question(
        module=module,
        dtype=formats.dtype,
        rates=guess if cuda or gpu_bytes is not None else replace(guess, gpu_bytes=None),
        gpu_bytes=gpu_bytes,
        host_bytes=host_memory().available_bytes,
        batch=max(1, work.tokens // length),
        length=length,
        accumulation=max(1, work.passes // own.passes),
        chooses=work.chooses,
        clips=work.clips,
        steps=work.steps / row.steps if work.steps else Question.steps,
        settings={work.method: own},
    )
    wire = None if formats.plain == formats.dtype and not formats.packs else formats.name
    found = cheapest_changes(question, work.method, placement, wire)
    if not found:
        return ""
    lines = [str(change) if rates is not None else str(change).rpartition(",")[0] for change in found]
    return "\nWhat would fit, cheapest first:\n" + "\n".join(f"  {line}" for line in lines)
