"""Shows questions as the model gets them: the prompt in tokens, then every candidate, the right one marked.

question 1 of 1,000 (sst2/train.tsv, row 42110): 4 tokens of prompt, 2 candidates
  read         0  f|ancy| It| was
  ids             ...
  RIGHT        4   great
  wrong        4   terrible

Rows of a classifier have a label each, and no candidates.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from keyhole.data.dataset import IGNORED, Dataset
from keyhole.data.preview import run_lines
from keyhole.data.tasks.dataset import ends
from keyhole.data.tasks.encode import Encoder
from keyhole.data.tasks.question import Task
from keyhole.errors import printable


def preview_task(task: Task, tokenizer: Any, encoder: Encoder, n: int, *, color: bool, end: bool | None) -> str:
    """The first n questions. end: the setting train_end_token."""
    lines: list[str] = []
    for index, encoded in enumerate(encoder.encode(task.questions[:n], ends(task, end))):
        lines += [*_question(task, index, encoded, tokenizer, color), ""]
    return "\n".join(lines)


def preview_classes(dataset: Dataset, tokenizer: Any, labels: Sequence[str], n: int) -> str:
    """The first n rows of a classifier, with their labels."""
    lines: list[str] = []
    for i in range(min(n, len(dataset))):
        row = dataset[i]
        assert row.target is not None
        answer = f"label {labels[int(row.target)]}" if len(labels) > 1 else f"{labels[0]} {row.target:g}"
        place = f"row {i + 1} of {len(dataset):,} ({printable(dataset.where[dataset.rows[i][0]], 300)})"
        lines.append(f"{place}: {len(row.input_ids)} tokens, {answer}")
        lines += [*run_lines(tokenizer, row.input_ids, 0, "read", show_ids=True), ""]
    return "\n".join(lines)


def _question(task: Task, index: int, encoded: list[Any], tokenizer: Any, color: bool) -> Iterator[str]:
    question = task.questions[index]
    place = f"question {index + 1} of {len(task.questions):,} ({printable(question.where, 300)})"
    if not encoded:
        yield f"{place}: longer than max_length, so it is dropped"
        return
    begin = next(t for t, label in enumerate(encoded[0].labels) if label != IGNORED)
    told = f"{len(encoded)} candidates" if len(encoded) > 1 else "an answer in free text"
    yield f"{place}: {begin} tokens of prompt, {told}"
    yield from run_lines(tokenizer, encoded[0].input_ids[:begin], 0, "read", show_ids=True)
    rights = (question.answer, *question.also)
    for i in sorted(range(len(encoded)), key=lambda i: i not in rights):
        word = "RIGHT" if i in rights else "wrong"
        row = encoded[i]
        start = next(t for t, label in enumerate(row.labels) if label != IGNORED)
        yield from run_lines(tokenizer, row.input_ids[start:], start, word, color=color and i in rights, show_ids=True)
