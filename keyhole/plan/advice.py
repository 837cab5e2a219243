"""Which row of the table to choose, and why.

Rows that fit are compared by the seconds of a step. Where a method is known to need many times the steps (`steps` of
its row: forward passes alone), so many of its steps count as one: a guess, printed with its evidence, since no formula
knows the task. Methods that train all parameters come first: adapters are recommended only if nothing else fits. Of the
rows within NEAR of the fastest, the one with the least GPU memory is chosen, since it leaves room for longer samples. A
row that `keyhole train` would refuse for this number of steps (fp8, whose rounding noise accumulates) is chosen only if
nothing else fits.

Which changes would make a run fit, cheapest first.

Each candidate is planned like any row (plan/table.py), and those that fit are ordered by their cost:

    0   only time: placement=auto or stream, block inputs in host memory, passes of fewer rows
    1   another storage format of the weights: a smaller wire, a 16-bit dtype
    2   what is learned: fewer tokens per sample, settings listed in the method's row, another method

and within each kind by seconds per step. A number is lowered as little as possible: it is halved until the run fits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from keyhole.machine.gpu import ACCELERATOR
from keyhole.machine.host import host_memory
from keyhole.machine.sizes import GIB, about
from keyhole.machine.text import counted
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
    least = min(map(counted_seconds, fitting))
    near = [row for row in fitting if counted_seconds(row) <= NEAR * least]
    return min(near, key=lambda row: (row.gpu_bytes, counted_seconds(row)))


def counted_seconds(row: Row) -> float:
    """Of as many steps as count as one."""
    return row.step_seconds * METHODS[row.method].steps


def _to_choose_from(rows: Sequence[Row]) -> list[Row]:
    """Rows that fit and would not be refused; if there are none, all rows that fit."""
    return [row for row in rows if row.fits and not row.refused] or [row for row in rows if row.fits]


def settings_of(row: Row, question: Question) -> str:
    """The settings of the row, as arguments of `keyhole train`."""
    words = [f"method={row.method}", f"placement={row.placement}"]
    if row.placement == "auto" and question.gpu_bytes is not None:
        words.append(f"gpu_memory={about(question.gpu_bytes)}")
    return " ".join(words + ([f"wire={row.wire}"] if row.wire else []))


def reason(row: Row, rows: Sequence[Row]) -> str:
    """The reason for the choice, in one sentence."""
    if not row.full:
        return f"nothing that trains all parameters fits; {row.method} trains adapters beside them"
    rows = [other for other in _to_choose_from(rows) if other.full]
    fastest, pace = min(rows, key=counted_seconds), f"{row.step_seconds:.3g} s per step, bound by {row.bound_by}"
    names = dict.fromkeys(other.method for other in rows if METHODS[other.method].evidence)
    pace += "".join(f" ({METHODS[name].steps:g} steps of {name} count as one)" for name in names)
    if fastest is row:
        return f"the fastest of {counted(len(rows), 'row')} that fit and train all parameters: {pace}"
    near = f"{fastest.method} {fastest.placement}, {fastest.step_seconds:.3g} s, {about(fastest.gpu_bytes)}"
    return f"{pace}; within {NEAR - 1:.0%} of the fastest ({near}), with less GPU memory"


@dataclass(frozen=True)
class Change:
    """Settings with which the run fits, and their cost."""

    settings: str
    row: Row
    kind: int

    def __str__(self) -> str:
        gpu, host = self.row.gpu_bytes / GIB, self.row.host_bytes / GIB
        return f"{self.settings}: {gpu:.1f} GiB of GPU memory, {host:.1f} GiB of host memory"


def cheapest_changes(
    question: Question, method: str, placement: str, wire: str | None = None, count: int = COUNT
) -> list[Change]:
    """At most `count` changes that make this method fit, or another one: the cheapest of each setting."""
    found = list[Change]()
    for kind, settings, changed, other, where, form in _candidates(question, METHODS[method], placement, wire):
        row = plan_row(changed, other, where, form)
        if row is not None and row.fits:
            found.append(Change(settings, row, kind))
    found.sort(key=lambda change: (change.kind, change.row.step_seconds))
    kept: dict[str, Change] = {}
    for change in found:
        key, _, value = change.settings.partition("=")
        kept.setdefault(f"{key} {value.split()[0]}" if key == "method" else key, change)
    return list(kept.values())[:count]


Candidate = tuple[int, str, Question, Traits, str, str | None]


def _candidates(question: Question, traits: Traits, placement: str, wire: str | None) -> Iterator[Candidate]:
    """(kind, settings, question, method, placement, wire) of every change."""
    own = list(_own_changes(question, traits))
    width = question.dtype.itemsize if wire is None else bytes_per_element(wire)
    for at in sorted(("auto", "stream") if traits.streams else ("resident",), key=lambda place: place != placement):
        shown = "" if at == placement else f" placement={at}"
        for settings, changed in [("", question), *own] if shown else own:
            yield 0, (settings + shown).strip(), changed, traits, at, wire
        for form in traits.all_wires(question.settings.get(traits.name) or traits.settings()):
            if bytes_per_element(form) < width:
                yield 1, f"wire={form}{shown}", question, traits, at, form
        if question.dtype == torch.float32 and wire is None:
            yield 1, f"dtype=bfloat16{shown}", replace(question, dtype=torch.bfloat16), traits, at, None
        if (shorter := _first(_shortened(question), traits, at, wire)) is not None:
            yield 2, f"max_length={shorter.length}{shown}", shorter, traits, at, wire
    for other in METHODS.values():
        if other.name != traits.name and not other.keeps_base:
            for at in ("resident", "auto", "stream") if other.streams else ("resident",):
                shown = "" if at == placement else f" placement={at}"
                yield 2, f"method={other.name}{shown}", question, other, at, None


def _first(changed: Iterator[Question], traits: Traits, placement: str, wire: str | None) -> Question | None:
    """The first that fits."""
    for question in changed:
        row = plan_row(question, traits, placement, wire)
        if row is not None and row.fits:
            return question
    return None


def _shortened(question: Question) -> Iterator[Question]:
    while question.length > SHORTEST:
        question = replace(question, length=question.length // 2)
        yield question


def _own_changes(question: Question, traits: Traits) -> Iterator[tuple[str, Question]]:
    """Settings of the method that need less memory, according to its row."""
    own = question.settings.get(traits.name) or traits.settings()
    for text in own.advice:
        key, _, value = text.partition("=")
        name = key.rpartition(".")[2]
        changed = type(own)(**vars(own) | {name: int(value) if value.isdecimal() else value})
        yield text, replace(question, settings={**question.settings, traits.name: changed})


def said(
    module: nn.Module, placement: str, gpu_bytes: int | None, formats: Wire, device: torch.device, work: Workload
) -> str:
    """For a refusal: the cheapest changes, one per line; "" if no change is known to fit, or nothing is trained."""
    if work.method not in METHODS:
        return ""
    guess = known(device) or next(iter(PROFILES.values()))
    cuda = device.type == ACCELERATOR
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
        steps=work.steps or Question.steps,
        settings={work.method: own},
    )
    wire = None if formats.plain == formats.dtype and not formats.packs else formats.name
    found = cheapest_changes(question, work.method, placement, wire)
    return "\nWhat would fit, cheapest first:\n" + "\n".join(f"  {change}" for change in found) if found else ""
