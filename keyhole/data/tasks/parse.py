"""Reads a task file into a TaskSpec, or reports what is wrong with it: the file, the key, the value found and what was
expected.

Scalars are read as text: YAML's conversions (`no` is False, `1.0` a number) would change label words.
"""

import os
import re
import types
import typing
from collections import Counter
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from keyhole.config.faults import nearest
from keyhole.data.tasks.spec import (
    CHOICE,
    LIBRARY,
    LIKELIHOOD,
    METRICS,
    OWN_SPLITS,
    SPLITS,
    USUAL_SPLITS,
    Expression,
    TaskSpec,
    Text,
    is_task_file,
    is_task_name,
    own_name,
    unknown_task,
)
from keyhole.data.tasks.tables import spelled
from keyhole.disk.files import read_small
from keyhole.errors import UserError, listed, printable

Value: TypeAlias = "str | list[Value] | dict[str, Value]"  # whatever YAML holds, read as text

MOST_BYTES = 2**18
OF_CHOICES = ("candidate", "labels", "right")
OF_ANSWERS = ("answer", "references", "extract", "stop", "max_new_tokens")  # keys of tasks that generate


def read_spec(name: str) -> TaskSpec:
    """The task with this name, or from this file. The test files of public tasks have no labels, so such tasks are
    judged by the validation set; a user's own task by its test file, where there are three."""
    is_file = is_task_file(name)
    if not is_file and not is_task_name(name):
        raise UserError(f"task: {unknown_task(name)}")
    path = Path(os.path.expanduser(name)) if is_file else LIBRARY / f"{own_name(name)}.yaml"
    try:
        text = read_small(path, MOST_BYTES).decode()
    except UnicodeDecodeError:
        raise UserError(f"task: {path}: not UTF-8 text; is it a task file?") from None
    except OSError as error:
        raise UserError(f"task: {path}: cannot be read: {error.strerror}") from None
    spec = parse_spec(text, path.stem, str(path) if is_file else name)
    return replace(spec, splits=OWN_SPLITS) if is_file and spec.splits is USUAL_SPLITS else spec


def parse_spec(text: str, name: str, source: str) -> TaskSpec:
    """A task file's text as a task. source: what messages call it."""
    try:
        given = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"task {source}: not valid YAML: {printable(str(error), 300)}") from None
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise UserError(f"task {source}: expected `key: value` lines, from `title:` to `metric:`")
    kinds = typing.get_type_hints(TaskSpec)
    kinds["metric"] = kinds.pop("metrics")
    known = [key for key in kinds if key != "name"]
    if unknown := [key for key in given if key not in known]:
        raise UserError(
            f"task {source}: unknown key {listed(unknown)}{nearest(unknown[0], known)}; a task file may have "
            f"{', '.join(known)}"
        )
    if "candidate" in given and "candidates" not in given:
        raise UserError(f"task {source}: candidate: words one of the candidates; did you mean `candidates`, the list?")
    if missing := [key for key in ("columns", "prompt", "metric") if key not in given]:
        raise UserError(f"task {source}: {listed(missing)} is missing; see docs/tasks.md for a whole file")
    values = {key: _read(value, kinds[key], f"task {source}: {key}") for key, value in given.items()}
    values["metrics"] = values.pop("metric")
    values["labels"] = tuple(tuple(spelled(word) for word in words) for words in values.get("labels", ()))
    if unknown := [metric for metric in values["metrics"] if metric not in METRICS]:
        raise _wrong(f"task {source}: metric", ", ".join(METRICS), unknown)
    spec = TaskSpec(**{"name": name, "title": name, **values})
    try:
        re.compile(spec.extract or "")
    except re.error as error:
        raise UserError(f"task {source}: extract: not a regular expression: {error}") from None
    if fault := next((words for holds, words in _faults(spec) if holds), ""):
        raise UserError(f"task {source}: {fault}")
    return spec


def _read(value: Value, kind: Any, key: str) -> Any:
    """A value of YAML as one of a field's type; a text may stand for a list of one."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _read(value, Expression if Expression in args and isinstance(value, str) else args[0], key)
    if origin is tuple:
        return tuple(_read(item, args[0], key) for item in (value if isinstance(value, list) and value else [value]))
    if origin is dict:
        if not isinstance(value, dict) or not value or not all(isinstance(name, str) for name in value):
            raise _wrong(key, "names with values, such as {sentence: text}", value)
        return {name: _read(item, args[1], f"{key}.{name}") for name, item in value.items()}
    if not isinstance(value, str) or not value:
        raise _wrong(key, "text", value)
    if kind is int and not (value.isdecimal() and 1 <= int(value[:9]) <= 10**6):
        raise _wrong(key, "a whole number from 1 on", value)
    if kind is bool and value not in ("true", "false"):
        raise _wrong(key, "true or false", value)
    if kind is bool:
        return value == "true"
    return kind(value, key) if kind in (Text, Expression) else kind(value)


def _wrong(key: str, expected: str, value: object) -> UserError:
    return UserError(f"{key}: expected {expected}, found {value!r:.60}")


def _faults(spec: TaskSpec) -> list[tuple[object, str]]:
    """Rules between keys: whether each is violated, and the words for it."""
    chooses, listed_candidates = spec.kind == CHOICE, spec.candidates if isinstance(spec.candidates, tuple) else ()
    defaults = {f.name: f.default for f in fields(TaskSpec) if f.default is not MISSING}
    strange = [key for key in (OF_ANSWERS if chooses else OF_CHOICES) if vars(spec)[key] != defaults[key]]
    spellings = Counter(word for words in spec.labels for word in words)
    twice = sorted(word for word, count in spellings.items() if count > 1)
    unknown = [name for name in (*spec.optional, *filter(None, [spec.value])) if name not in spec.columns]
    known = set(spec.columns)
    for name, expression in spec.let.items():
        known |= {name} if expression.names & known else set()
    # A constant prompt is right where the candidates differ from row to row, and where the likelihood is the result
    programs = [spec.prompt, spec.candidate, spec.candidates if isinstance(spec.candidates, Expression) else None]
    asks = spec.kind == LIKELIHOOD or any(program.names & known for program in programs if program is not None)
    fixed = next((text for text in spec.texts if not text.names & known), None)
    inputs = [("prompt", spec.prompt), ("candidate", spec.candidate), *(("texts", text) for text in spec.texts)]
    telling = next((key for key, text in inputs if text is not None and "label" in text.names), "")
    named = spec.right is not None or spec.value is not None or spec.has_label
    hub, splits = spec.hub.keys(), next((s.keys() for s in spec.splits if not {"test"} <= s.keys() <= set(SPLITS)), ())
    return [
        (
            hub and not {"dataset"} <= hub <= {"dataset", "config", *SPLITS},
            f"hub: expected dataset, config and splits (train, test, dev), found {listed(hub)}",
        ),
        (splits, f"splits: expected train, test and perhaps dev, found {listed(splits)}"),
        (
            len({METRICS[metric] for metric in spec.metrics}) > 1,
            f"metric: {', '.join(spec.metrics)} do not go together: some choose, some generate",
        ),
        (chooses and not spec.candidates, f"metric: {spec.metric} needs candidates"),
        (
            not chooses and spec.candidates,
            f"metric: {spec.metric} is for answers in free text, and there are candidates",
        ),
        (not chooses and spec.answer is None, f"answer: missing; {spec.metric} needs an answer in free text"),
        (
            strange,
            f"{listed(strange)}: for tasks with {'answers in free text' if chooses else 'candidates'}, not with metric "
            f"{spec.metric}; remove it",
        ),
        (chooses and not named, "columns: label is missing (or say `right:`): it names the right candidate"),
        (
            spec.right is not None and spec.labels,
            "labels: of no use beside `right`, which names the right candidate itself; remove one of them",
        ),
        (
            "f1" in spec.metrics and len(listed_candidates) > 2,
            f"metric: f1 is that of the second of two candidates, and there are {len(listed_candidates)}; use macro_f1",
        ),
        (
            spec.labels and listed_candidates and len(spec.labels) != len(listed_candidates),
            f"labels: {len(spec.labels)} of them for {len(listed_candidates)} candidates; give one list for each",
        ),
        (twice, f"labels: {listed(twice)} stands for two candidates"),
        (listed_candidates and len(set(listed_candidates)) < 2, "candidates: two different texts at least"),
        (
            len(spec.texts) > 2 or (spec.texts and not chooses),
            "texts: one or two, for tasks with candidates: what a classifier is given",
        ),
        (
            ("pearson" in spec.metrics) != (spec.value is not None),
            "value: goes with metric pearson: the column with the number that is compared",
        ),
        (
            ("pass@1" in spec.metrics) != (spec.program is not None),
            "program: goes with metric pass@1: the program that checks a completion",
        ),
        (unknown, f"{listed(unknown)}: not one of the columns {listed(spec.columns)}"),
        (not asks, f"prompt: {_names_none(spec.prompt, spec)}"),
        (
            chooses and telling,
            f"{telling}: reads label, which names the right candidate, so the question would give its answer away",
        ),
        (fixed is not None, f"texts: {_names_none(fixed or spec.prompt, spec)}"),
    ]


def _names_none(text: Text, spec: TaskSpec) -> str:
    names = [name for name in (*spec.columns, *spec.let) if name != "label" or spec.kind != CHOICE]
    single = next((name for name in names if f"{{{name}}}" in text.source), None)
    hint = f"; {{{single}}} is plain text here" if single else ""
    return (
        f"{text.source!r:.80} names no column, so every row would ask the same{hint}; write one of {listed(names)} in "
        f"double braces, such as {{{{ {single or (names or ['text'])[0]} }}}}"
    )


class _Loader(yaml.BaseLoader):
    """Reads every scalar as text; a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        first: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in first:
                raise ValueError(f"line {line}: {key.value} is given twice, also in line {first[key.value]}")
            first[key.value] = line
        return dict(super().construct_mapping(node, deep=True))
