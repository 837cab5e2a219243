"""Draws by seed which questions are for training, which select the best step (dev), and which score the model (test).

As in MeZO, train and dev are drawn from the training split and share no row; test is drawn from the validation set,
whose answers are public.

    order    a permutation of the rows that is a pure function of the seed (loader.order)
    train    its first num_train rows
    dev      the next num_dev; if there are fewer than num_train + num_dev rows, dev takes its number first, but at
             most two fifths of the rows (CB: 250 rows, num_dev 100 -> 150 to train, as in MeZO)
    test     num_eval rows drawn with seed 0, regardless of the seed of the run, so that all runs answer the same
             questions

Only drawn rows are rendered: 1,500 of QQP's 364,000 rows. Splits that share a row are refused; questions that occur in
two files, or twice in one, are counted in a warning, and so are empty texts.
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.data.loader import order
from keyhole.data.record import Record
from keyhole.data.tasks.build import build, number_of
from keyhole.data.tasks.cache import kept
from keyhole.data.tasks.names import own_splits
from keyhole.data.tasks.parse import read_spec, read_text
from keyhole.data.tasks.pattern import matches
from keyhole.data.tasks.places import Split, find_splits, read_split
from keyhole.data.tasks.question import Question, Task
from keyhole.data.tasks.spec import GENERATED, OWN_SPLITS, TaskSpec
from keyhole.data.tasks.tables import latin_line, suffix_of
from keyhole.errors import UserError, listed

TEST_SEED = 0
LEAST_ANSWERS = 8  # fewer may be equal by chance


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The number of questions of each kind; None: all."""

    train: int | None = 1000
    dev: int = 500
    test: int | None = 1000
    seed: int = 0


def load_task(
    name: str,
    task_data: str | None,
    numbers: Numbers,
    splits: dict[str, str] | None = None,
    *,
    training: bool = True,
    cache: str | None = None,
) -> dict[str, Task]:
    """{"train", "dev", "test"} of a task; only "test" if training is false. splits: the setting task_splits; cache:
    the setting data_cache."""
    text = read_text(name)
    spec = read_spec(name)
    places = find_splits(spec, task_data, own_splits(splits, spec.name))
    how = [asdict(numbers), training]
    return kept(cache, spec, text, places, how, lambda: _draw(spec, places, numbers, training))


def _draw(spec: TaskSpec, places: dict[str, Split], numbers: Numbers, training: bool) -> dict[str, Task]:
    if training:
        _check_disjoint(spec, places)
    test = {"test": _test(spec, places, numbers)}
    if training and "train" in places:
        return _compared(_train(spec, places, numbers) | test)
    if training:
        raise UserError(
            f"task_data: task {spec.name} has rows to be judged by ({places['test']}), and none to train on: add a "
            f"file train.jsonl, or divide the one there is: task_splits: {places['test'].divided()}; to be judged by "
            f"it only: test_task={spec.name}"
        )
    return test


def _compared(drawn: dict[str, Task]) -> dict[str, Task]:
    """The same tasks, with a warning if a split repeats a question of an earlier one."""
    asked = {split: {_asked(question) for question in task.questions} for split, task in drawn.items()}
    for one, other in combinations(drawn, 2):
        task = drawn[other]
        if count := sum(_asked(question) in asked[one] for question in task.questions):
            told = f"{count:,} of the {len(task.questions):,} questions of {other} are also among those of {one}"
            drawn[other] = replace(task, warnings=(*task.warnings, told))
    return drawn


def _asked(question: Question) -> tuple[str, tuple[str, ...]]:
    """The key by which questions are compared: without an answer in free text."""
    choices = question.candidates if len(question.candidates) > 1 else ()
    return str(question.prompt), choices


def _check_disjoint(spec: TaskSpec, places: dict[str, Split]) -> None:
    """Refuses splits with a common row: a model would be selected or scored on rows that it was trained on."""
    for one, other in combinations(places, 2):
        first, second = places[one], places[other]
        shared: set[Any] = set(first.names) & set(second.names)  # names, or rows
        if shared and first.names == second.names:
            files = [(name,) for name in first.names] if first.each else [first.names]
            counts = [len(read_split(spec, Split(names), Counter())) for names in files]
            shared = {row for count in counts for row in set(first.rows(count)) & set(second.rows(count))}
        if shared:
            raise UserError(
                f"task_splits: task {spec.name}: {one} ({first}) and {other} ({second}) share rows; name different "
                f"files, or parts without a common row: {second.divided(one, other)}"
            )


def _train(spec: TaskSpec, places: dict[str, Split], numbers: Numbers) -> dict[str, Task]:
    records, note = _read(spec, places["train"])
    rows = order(len(records), numbers.seed, 0)
    if "dev" in places:
        others, other_note = _read(spec, places["dev"])
        chosen = order(len(others), numbers.seed, 0)[: numbers.dev]
        dev = _task(spec, others, chosen, places["dev"], other_note)
        return {"train": _task(spec, records, rows[: numbers.train], places["train"], note), "dev": dev}
    held_out = min(numbers.dev, 2 * len(records) // 5)
    train = min(len(records) - held_out, len(records) if numbers.train is None else numbers.train)
    return {
        "train": _task(spec, records, rows[:train], places["train"], note),
        "dev": _task(spec, records, rows[train : train + held_out], places["train"], ""),
    }


def _test(spec: TaskSpec, places: dict[str, Split], numbers: Numbers) -> Task:
    place, three = places["test"], spec.splits is OWN_SPLITS and "dev" in places
    records, note = _read(spec, place, "; to be judged by the dev file: task_splits: {test: validation}" * three)
    return _task(spec, records, np.sort(order(len(records), TEST_SEED, 0)[: numbers.test]), place, note)


def _read(spec: TaskSpec, place: Split, advice: str = "") -> tuple[list[Record], str]:
    left_out: Counter[str] = Counter()
    records = read_split(spec, place, left_out)
    note = "".join(f"; {count:,} {why} left out" for why, count in left_out.items() if count)
    for path in (Path(name) for name in place.names if Path(name).is_file()):
        if line := latin_line(path):
            note += f"; {path.name} is read as Latin-1, because line {line} is not UTF-8 and no other letter is"
    if not records:
        why = f"{note}{_why(spec, place, left_out)}{advice}"
        raise UserError(f"task {spec.name}: {place} holds no row that could be used{why}")
    return records, note


def _why(spec: TaskSpec, place: Split, left_out: Counter[str]) -> str:
    """Why a split has no rows: because of its slice, or of its files; "" where the rows left out say it."""
    if count := len(read_split(spec, Split(place.names), Counter())):
        low, high = place.start, place.stop
        aside = f" (its last {-high:,} are set aside for another split)" if isinstance(high, int) and high < 0 else ""
        advice = f"divide them in another way: task_splits: {place.divided()}" if count > 1 else "add rows"
        files = f"the file has {count:,}" if len(place.names) == 1 else f"the files have {count:,}"
        slice_text = f"[{'' if low is None else low}:{'' if high is None else high}]"
        return f"; {files}, of which {slice_text} takes none{aside}: {advice}"
    sizes = [Path(name).stat().st_size for name in place.names if Path(name).is_file()]
    if sizes and not any(sizes):
        return "; the file is empty (0 bytes): was its download or its copy cut off?"
    tables = [name for name in place.names if suffix_of(Path(name)) in (".tsv", ".csv")]
    return "; it has a header line at most, and no row below it" if tables and not left_out.total() else ""


def _task(spec: TaskSpec, records: list[Record], chosen: np.ndarray, place: Split, note: str) -> Task:
    questions = [question for i in chosen if (question := build(records[i], spec)) is not None]
    if len(chosen) and not questions:
        raise UserError(f"task {spec.name}: no row of {place} has an answer")
    note += f"; {len(chosen) - len(questions):,} without an answer left out" if len(chosen) > len(questions) else ""
    count = f"{len(questions):,} of {len(records):,}" if len(questions) < len(records) else f"all {len(records):,}"
    warnings = (
        *_empty(spec, records, chosen, place),
        *_one_answer(spec, questions, place),
        *_out_of_reach(spec, questions, place),
    )
    return Task(spec.name, questions, spec, f"{count} rows of {place}{note}", warnings)


def _one_answer(spec: TaskSpec, questions: list[Question], place: Split) -> list[str]:
    """A warning if all questions have the same answer: a model learns to give it whatever it is asked."""
    if not isinstance(spec.candidates, tuple) or len(questions) < LEAST_ANSWERS or spec.value is not None:
        return []
    answers = {question.candidates[question.answer] for question in questions}
    told = (
        f"all {len(questions):,} rows drawn from {place} have the same answer, {min(answers)!r}; are the rows sorted?"
    )
    return [told] if len(answers) == 1 else []


def _out_of_reach(spec: TaskSpec, questions: list[Question], place: Split) -> list[str]:
    """Warnings about answers that count as right, but that no model can give."""
    found = {}
    if spec.value is not None and isinstance(spec.candidates, tuple):
        numbers = [number_of(text, "candidates") for text in spec.candidates]
        beyond = [q for q in questions if q.value is not None and not min(numbers) <= q.value <= max(numbers)]
        found[f"{spec.value} outside of the candidates, {min(numbers):g} to {max(numbers):g}"] = beyond
    if spec.kind == GENERATED and spec.program is None:
        stopped = [q for q in questions if any(word in q.candidates[0].strip() for word in spec.stop)]
        found[f"an answer with one of the stop strings, {listed(map(repr, spec.stop))}, where generation ends"] = (
            stopped
        )
    if spec.kind == GENERATED and spec.extract is not None:
        without = [q for q in questions if not any(matches(spec.extract, text) for text in q.references)]
        found[f"references in which `extract` finds nothing ({spec.extract})"] = without
    return [
        f"{len(rows):,} of the {len(questions):,} rows drawn from {place} have {what} (such as {rows[0].where})"
        for what, rows in found.items()
        if rows
    ]


def _empty(spec: TaskSpec, records: list[Record], chosen: np.ndarray, place: Split) -> tuple[str, ...]:
    """A warning for each text that is empty in some rows."""
    found: dict[str, list[str]] = {}
    for record in (records[i] for i in chosen):
        for name in (name for name in spec.columns if name not in spec.optional):
            if isinstance(record.row[name], str) and not record.row[name].strip():
                found.setdefault(name, []).append(record.where)
    return tuple(
        f"{len(rows):,} of the {len(chosen):,} rows drawn from {place} have an empty {name} (such as {rows[0]})"
        for name, rows in found.items()
    )
