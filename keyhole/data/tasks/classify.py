"""Questions for a classifier: the task's text, or both of its texts, as one row of tokens with one label.

The tokenizer adds its special tokens to the texts: [CLS] a [SEP], or [CLS] a [SEP] b [SEP] with token types 0 and 1 if
the model has types. A row that is too long loses tokens at the end; of two texts, the longer one does. Such a row may
also be dropped or refused (`overlong`). An empty text of a tokenizer that adds no special tokens (most decoders') is
one token, bos or eos: a row of padding alone has no logits. Training and scoring use the same rows.

The labels of the model, and which of them belongs to which class of a task (`Labels`):

names    the names of a task's classes: as spelled in the data (`labels` of the task file: negative, positive), or
             else the candidates; a task with a `value` is a regression with one name, its column
    order    the model's label of each class. By name, if the model's config has names that the task knows (a
             published model of MNLI may begin with contradiction); by number, if it has none (LABEL_0, LABEL_1) or
             a new head was requested, which then gets the task's names

Anything else is refused: a wrong order would train, or score, the opposite.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keyhole.data.collect import Encoded
from keyhole.data.dataset import IGNORED, Sample
from keyhole.data.report import Report
from keyhole.data.settings import DataSettings
from keyhole.data.tasks.encode import token_for_nothing
from keyhole.data.tasks.question import Question, Task
from keyhole.data.tasks.spec import TaskSpec
from keyhole.data.tokens import Tokenizer, pad_token_id
from keyhole.errors import UserError, listed
from keyhole.model.classification import MULTI_LABEL, REGRESSION, problem_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Labels:
    """names: in the model's order. order: the model's label of each class of the task; none for a regression."""

    names: tuple[str, ...]
    order: tuple[int, ...] = ()

    def target(self, question: Question) -> int | float | None:
        """What the model should answer: a label, or the value of a regression."""
        return self.order[question.answer] if self.order else question.value


def class_names(spec: TaskSpec, num_labels: int | None = None, head_asked: bool = True) -> tuple[str, ...]:
    """The names of a task's labels. num_labels: as set, or as the model has it if no head was asked for; None: as the
    task has it."""
    if spec.value is not None and num_labels in (None, 1):
        return (spec.value,)
    if not isinstance(spec.candidates, tuple) or not spec.candidates:
        why = "its candidates differ from row to row" if spec.candidates else "its answers are free text"
        raise UserError(f"task {spec.name}: {why}; a classifier has no labels for it, use a decoder without head")
    if num_labels not in (None, len(spec.candidates)):
        theirs = f"task {spec.name} has {len(spec.candidates)} labels"
        if head_asked:
            raise UserError(f"num_labels: {num_labels}, but {theirs}; set num_labels=null")
        raise UserError(
            f"model: its head is for {num_labels} labels (num_labels of its config), but {theirs}; choose another "
            "model; to train, head=classification draws a new head"
        )
    spellings = [[word for word in words if not word.lstrip("-").isdecimal()] for words in spec.labels]
    spellings = spellings or [[] for _ in spec.candidates]
    names = [words[0] if words else text.strip() for words, text in zip(spellings, spec.candidates, strict=True)]
    if len({name.lower() for name in names}) < len(names):
        raise UserError(
            f"task {spec.name}: two of its labels have one name ({listed(names)}), whatever the case; a classifier "
            "knows labels by name: give them different words in `labels` of the task file"
        )
    return tuple(names)


def find_labels(specs: Sequence[TaskSpec], config: "PreTrainedConfig", head_asked: bool = False) -> Labels:
    """The labels of a classifier for these tasks, which must have the same labels. config: the model's."""
    names = class_names(specs[0], config.num_labels, head_asked)
    for other in specs[1:]:
        count = None if other.value is None else config.num_labels  # without a value, the task's own number
        if (found := class_names(other, count, head_asked)) != names:
            raise UserError(
                f"task: {specs[0].name} has the labels {listed(names)}, {other.name} has {listed(found)}; a classifier "
                "has one list of labels: train on one of them"
            )
    problem = problem_of(config)
    if problem == MULTI_LABEL or (problem == REGRESSION and config.num_labels > 1):
        raise UserError(
            f"model: its config says problem_type={problem} with {config.num_labels} labels; a row of a task has one: "
            "remove problem_type from config.json"
        )
    if problem == REGRESSION:
        return Labels(names)
    own = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    if (order := _by_name(specs[0], names, own)) is not None:
        return Labels(own, order)
    if head_asked or own == tuple(f"LABEL_{i}" for i in range(len(own))):
        return Labels(names, tuple(range(len(names))))
    raise UserError(
        f"model: its labels are {listed(own)} (id2label of its config), those of task {specs[0].name} are "
        f"{listed(names)}; which is which? Rename the model's in config.json; to train, head=classification does so"
    )


def _by_name(spec: TaskSpec, names: tuple[str, ...], own: tuple[str, ...]) -> tuple[int, ...] | None:
    """The index of each class among the model's labels; None if one is missing, or two are the same."""
    assert isinstance(spec.candidates, tuple)
    known = [{name.lower(), text.strip().lower()} for name, text in zip(names, spec.candidates, strict=True)]
    known = [words | set(spec.labels[i] if spec.labels else ()) for i, words in enumerate(known)]
    places = [[i for i, name in enumerate(own) if name.strip().lower() in words] for words in known]
    found = tuple(place[0] for place in places if len(place) == 1)
    return found if len(set(found)) == len(own) else None


def check_settings(settings: DataSettings, architecture: str) -> None:
    """Refuses settings that have no meaning for a classifier."""
    if not settings.task:
        raise UserError(
            f"train_data: {architecture} classifies texts, and labels come from a task: set task to one by name, such "
            "as sst2, or to a task file of your own (docs/tasks.md)"
        )
    fit = {"loss": "tokens", "packing": False, "train_end_token": None}  # the others are for language models
    for key, usual in fit.items():
        if (found := vars(settings)[key]) != usual:
            raise UserError(f"{key}: {found} has no meaning for a classifier ({architecture}); leave {key} out")


Tokenised = tuple[list[int], list[int] | None]  # ids, and types


class TextEncoder:
    """Turns texts of questions into rows of tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        config: "PreTrainedConfig",
        max_length: int | None = None,
        overlong: str = "truncate",
    ) -> None:
        """config: the model's, which has the number of token types and the padding id."""
        if tokenizer is None:
            raise UserError("model: the directory has no tokenizer; copy its tokenizer files in")
        self.tokenizer, self.max_length, self.overlong = tokenizer, max_length, overlong
        self.has_types = (getattr(config, "type_vocab_size", None) or 0) > 1
        own = config.pad_token_id
        self.pad_token_id = own if isinstance(own, int) and own >= 0 else pad_token_id(tokenizer)
        self.truncated = 0

    def encode(self, questions: Sequence[Question], labels: Labels) -> list[Sample | None]:
        """A row for each question; None for one that is dropped."""
        texts = []
        for question in questions:
            if not question.texts and not isinstance(question.prompt, str):
                raise UserError(f"{question.where}: the prompt is a chat; a classifier is given text")
            texts.append(question.texts or (str(question.prompt),))
        whole = self._tokens(texts)
        for i, (ids, _) in enumerate(whole):
            if not ids:
                whole[i] = [token_for_nothing(self.tokenizer, questions[i])], [0] if self.has_types else None
        limit = self.max_length
        long = [] if limit is None else [i for i, (ids, _) in enumerate(whole) if len(ids) > limit]
        if long and self.overlong == "error":
            raise UserError(
                f"{questions[long[0]].where}: {len(whole[long[0]][0]):,} tokens, more than max_length={limit}; raise "
                "max_length, or set overlong to truncate or drop"
            )
        self.truncated += len(long)
        rows: list[Tokenised | None] = list(whole)
        cut = [None] * len(long) if self.overlong == "drop" else self._tokens([texts[i] for i in long], limit)
        for i, row in zip(long, cut, strict=True):
            rows[i] = row
        return [
            None if row is None else Sample(row[0], [IGNORED] * len(row[0]), None, row[1], labels.target(question))
            for question, row in zip(questions, rows, strict=True)
        ]

    def _tokens(self, texts: Sequence[tuple[str, ...]], limit: int | None = None) -> list[Tokenised]:
        """Ids and types of each row. All questions have the same number of texts, because they are of one task."""
        if not texts:
            return []
        columns = [list(column) for column in zip(*texts, strict=True)]
        if limit is not None and limit <= (special := self.tokenizer.num_special_tokens_to_add(len(columns) > 1)):
            raise UserError(f"max_length: {limit} leaves no room for a text beside {special} special tokens; raise it")
        how = {} if limit is None else {"truncation": True, "max_length": limit}
        made = self.tokenizer(*columns, return_token_type_ids=self.has_types, verbose=False, **how)
        if how:
            self.tokenizer("a")  # takes the limit away, which a fast tokenizer keeps and the model would save with it
        types = made["token_type_ids"] if self.has_types else [None] * len(texts)
        return list(zip(made["input_ids"], types, strict=True))


def class_rows(tasks: Sequence[Task], encoder: TextEncoder, labels: Labels, report: Report) -> Iterator[Encoded]:
    """The rows of all questions, for training; a row's source is the index of its task. report: counts what is cut,
    dropped, and of each label."""
    targets: list[int | float] = []
    for source, task in enumerate(tasks):
        for question, row in zip(task.questions, encoder.encode(task.questions, labels), strict=True):
            report.dropped_overlong += row is None
            if row is not None and row.target is not None:
                targets.append(row.target)
                ids = np.array(row.input_ids, dtype=np.int32)
                label = int(row.target) if labels.order else None
                samples: list[tuple[np.ndarray, np.ndarray]] = [(ids, np.zeros(len(ids), dtype=bool))]
                yield Encoded(samples, question.where, source, None, row.target, row.token_type_ids, (source, label))
    report.truncated = encoder.truncated if encoder.overlong == "truncate" else 0
    count = Counter(targets)
    report.labels = "labels: " + ", ".join(f"{count[i]:,} {name}" for i, name in enumerate(labels.names))
    if not labels.order and targets:
        report.labels = f"{labels.names[0]} from {min(targets):g} to {max(targets):g}"
