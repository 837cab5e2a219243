"""Draws by seed which questions are for training, which select the best step (dev), and which score the model (test).

As in MeZO, train and dev are drawn from the training split and share no row; test is drawn from the validation set,
whose answers are public.

    order    a permutation of the rows that is a pure function of the seed (batches.order)
    train    its first num_train rows
    dev      the next num_dev; if there are fewer than num_train + num_dev rows, dev takes its number first, but at
             most two fifths of the rows (CB: 250 rows, num_dev 100 -> 150 to train, as in MeZO)
    test     num_eval rows drawn with seed 0, regardless of the seed of the run, so that all runs answer the same
             questions
"""

from collections import Counter
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np

from keyhole.data.batches import order
from keyhole.data.opened import Record
from keyhole.data.prepare import About, Arrays, kept
from keyhole.data.settings import DataSettings
from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.places import Split, find_splits, read_split
from keyhole.data.tasks.question import Question, Task, build
from keyhole.data.tasks.spec import GENERATED, OWN_SPLITS, SPLITS, TaskSpec, check_names, extracted, listed_names
from keyhole.data.tasks.tables import latin_line
from keyhole.errors import UserError, listed
from keyhole.machine.worker import bounded

TEST_SEED = 0


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
    the setting data_cache. Drawing must first read all rows of the files, because only rows with a label can be
    drawn, so what is drawn is kept."""
    spec = read_spec(name)
    places = find_splits(spec, task_data, splits)
    names = sorted({file for place in places.values() for file in place.names})
    how = [spec.name, spec.fingerprint, asdict(numbers), training, {s: astuple(place) for s, place in places.items()}]

    def pack(drawn: dict[str, Task]) -> tuple[About, Arrays]:
        return {s: [task.about, task.warnings, [vars(q) for q in task.questions]] for s, task in drawn.items()}, {}

    def unpack(about: About, _: Arrays) -> dict[str, Task]:
        return {
            split: Task(spec.name, [Question.read_back(q) for q in questions], spec, told, tuple(warnings))
            for split, (told, warnings, questions) in about.items()
        }

    return kept(cache, "tasks", names, how, lambda: _draw(spec, places, numbers, training), pack, unpack)[0]


def _draw(spec: TaskSpec, places: dict[str, Split], numbers: Numbers, training: bool) -> dict[str, Task]:
    if training and "train" not in places:
        raise UserError(
            f"task_data: task {spec.name} has rows to be judged by ({places['test']}), and none to train on: add a "
            f"file train.jsonl, or divide the one there is: task_splits: {places['test'].divided()}; to be judged by "
            f"it only: test_task={spec.name}"
        )
    places = places if training else {"test": places["test"]}
    read = {split: _read(spec, split, places) for split in places}
    seen = {split: {(row.file, row.number, row.part) for row in rows} for split, (rows, _) in read.items()}
    for one, other in combinations(places, 2):  # else the model would be selected or scored on rows of its training
        if seen[one] & seen[other]:
            raise UserError(
                f"task_splits: task {spec.name}: {one} ({places[one]}) and {other} ({places[other]}) share rows; name "
                f"different files, or parts without a common row: {places[other].divided(one, other)}"
            )
    chosen = {"test": np.sort(order(len(read["test"][0]), TEST_SEED, 0)[: numbers.test])}
    if training:
        rows = order(len(read["train"][0]), numbers.seed, 0)
        if "dev" in places:
            chosen |= {
                "train": rows[: numbers.train],
                "dev": order(len(read["dev"][0]), numbers.seed, 0)[: numbers.dev],
            }
        else:
            held_out = min(numbers.dev, 2 * len(rows) // 5)
            count = min(len(rows) - held_out, len(rows) if numbers.train is None else numbers.train)
            chosen |= {"train": rows[:count], "dev": rows[count : count + held_out]}
            places, read = places | {"dev": places["train"]}, read | {"dev": (read["train"][0], "")}
    drawn = {s: _task(spec, read[s][0], chosen[s], places[s], read[s][1]) for s in SPLITS if s in chosen}
    # questions are compared without an answer in free text
    asked = {
        split: [(str(q.prompt), q.candidates if len(q.candidates) > 1 else ()) for q in task.questions]
        for split, task in drawn.items()
    }
    for one, other in combinations(drawn, 2):  # a split that repeats a question of an earlier one
        if count := sum(map(set(asked[one]).__contains__, asked[other])):
            told = f"{count:,} of the {len(asked[other]):,} questions of {other} are also among those of {one}"
            drawn[other] = replace(drawn[other], warnings=(*drawn[other].warnings, told))
    return drawn


def _read(spec: TaskSpec, split: str, places: dict[str, Split]) -> tuple[list[Record], str]:
    """The rows of a split, and a note on what was left out of its files."""
    left_out, place = Counter[str](), places[split]
    records = read_split(spec, place, left_out)
    note = "".join(f"; {count:,} {why} left out" for why, count in left_out.items() if count)
    for path in (Path(name) for name in place.names if Path(name).is_file()):
        if line := latin_line(path):
            note += f"; {path.name} is read as Latin-1, because line {line} is not UTF-8 and no other letter is"
    if not records:
        if (place.start, place.stop) != (None, None):
            note += f"; if the slice takes none, divide them in another way: task_splits: {place.divided()}"
        elif not left_out.total():
            note += "; is there a row below the header, and was the download cut off?"
        if split == "test" and spec.splits is OWN_SPLITS and "dev" in places:
            note += "; to be judged by the dev file: task_splits: {test: validation}"
        raise UserError(f"task {spec.name}: {place} holds no row that could be used{note}")
    return records, note


def _task(spec: TaskSpec, records: list[Record], chosen: np.ndarray, place: Split, note: str) -> Task:
    drawn = [records[i] for i in chosen]
    questions = built(drawn, spec)
    if len(chosen) and not questions:
        raise UserError(f"task {spec.name}: no row of {place} has an answer")
    note += f"; {len(chosen) - len(questions):,} without an answer left out" if len(chosen) > len(questions) else ""
    count = f"{len(questions):,} of {len(records):,}" if len(questions) < len(records) else f"all {len(records):,}"
    return Task(spec.name, questions, spec, f"{count} rows of {place}{note}", _odd(spec, drawn, questions, place))


def built(records: list[Record], spec: TaskSpec) -> list[Question]:
    """The questions of rows with the task's columns, without those that have no answer."""
    made = bounded(partial(build, spec=spec), records, lambda record: f"{record.where}: the task's file")
    return [question for question in made if question is not None]


def _odd(spec: TaskSpec, records: list[Record], questions: list[Question], place: Split) -> tuple[str, ...]:
    """Warnings about what was drawn: empty texts, and answers that count as right but that no model can give."""
    found: dict[str, list[str]] = {}
    for name in (name for name in spec.columns if name not in spec.optional):
        cells = ((record.where, record.row[name]) for record in records)
        found[f"an empty {name}"] = [where for where, cell in cells if isinstance(cell, str) and not cell.strip()]
    if spec.kind == GENERATED and spec.program is None:
        what = f"an answer with one of the stop strings, {listed(map(repr, spec.stop))}, where generation ends"
        found[what] = [q.where for q in questions if any(word in q.candidates[0].strip() for word in spec.stop)]
    if spec.kind == GENERATED and spec.extract is not None:
        parts = iter(extracted(spec.extract, [text for q in questions for text in q.references]))
        what = f"references in which `extract` finds nothing ({spec.extract})"
        found[what] = [q.where for q in questions if all([next(parts) is None for _ in q.references])]
    return tuple(
        f"{len(rows):,} of the {len(records):,} rows drawn from {place} have {what} (such as {rows[0]})"
        for what, rows in found.items()
        if rows
    )


def draw_tasks(settings: DataSettings, training: bool = True) -> list[dict[str, Task]]:
    """Train, dev and test of each task of a run; or the test of those that are only scored (test_task)."""
    names, only_scored = listed_names(settings.task), listed_names(settings.test_task)
    check_names([*names, *only_scored], settings.task_splits)
    numbers = Numbers(train=settings.num_train, dev=settings.num_dev, test=settings.num_eval, seed=settings.seed)
    data, splits, cache = settings.task_data, settings.task_splits, settings.data_cache
    return [
        load_task(name, data, numbers, splits, training=training, cache=cache)
        for name in (names if training else only_scored)
    ]


def report_lines(drawn: dict[str, Task]) -> list[str]:
    spec = drawn["train"].spec
    parts = [f"{split} {task.about} ({task.fingerprint})" for split, task in drawn.items() if task.questions]
    lines = [f"task {spec.name}: {part}" for part in (f"{spec.title}; {spec.metric}", *parts)]
    return lines + [line for task in drawn.values() for line in warning_lines(task)]


def warning_lines(task: Task) -> list[str]:
    return [f"warning: task {task.name}: {told}" for told in task.warnings]
