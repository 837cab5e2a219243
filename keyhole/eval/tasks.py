"""Task files: questions with candidate answers, one of which is right.

A row (JSONL, JSON or Parquet; keyhole.data.files reads it) is

    {"prompt": "The soup was cold.\nStamp:", "candidates": [" blue", " red"], "answer": 1}

    prompt       text, or a chat: a list of {role, content}, rendered by the model's chat template
    candidates   two or more texts; prompt and candidate are joined byte for byte, including the space between them
    answer       the index of the right one, from 0, or its text; the column may also be called `label`

Other columns are ignored, so rows that also have a `completion` can be used as training data too. `demo` is the
embedded task. An invalid row is refused with its file and line before a model is loaded.
"""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from keyhole import assets
from keyhole.data.files import read
from keyhole.data.opened import Record, check_text
from keyhole.data.tasks.question import Question, Task, Turns
from keyhole.errors import UserError, listed


def is_task(source: str) -> bool:
    """Whether the first row of a source has candidates; otherwise it is plain data."""
    first = next(iter(read(assets.locate(source, assets.TEST))))
    return "candidates" in first.row


def read_task(source: str, limit: int | None = None) -> Task:
    """All questions of a file, glob or directory, or the first `limit`."""
    return Task(task_name(source), questions(islice(read(assets.locate(source, assets.TEST)), limit)))


def task_name(source: str) -> str:
    """`demo`, or folder and file without the suffix: data/rte/val.jsonl is rte/val."""
    path = Path(source)
    return source if source == "demo" else f"{path.parent.name}/{path.stem}".lstrip("/")


def questions(records: Iterable[Record]) -> list[Question]:
    """Rows as questions."""
    return [_question(record) for record in records]


def _question(record: Record) -> Question:
    missing = [name for name in ("prompt", "candidates") if name not in record.row]
    if "answer" not in record.row and "label" not in record.row:
        missing.append("answer")
    if missing:
        raise UserError(
            f"{record.where}: a task needs prompt, candidates and answer; {', '.join(missing)} is missing, "
            f"found: {listed(record.row) or 'nothing'}"
        )
    candidates = _candidates(record)
    texts = [json.dumps(record.row["prompt"], ensure_ascii=False, default=str), *candidates]
    check_text("\n".join(texts), record.where)
    return Question(_prompt(record), candidates, _answer(record, candidates), record.where)


def _prompt(record: Record) -> str | Turns:
    prompt = record.row["prompt"]
    if isinstance(prompt, str):
        return prompt
    turns: list[Any] = prompt if isinstance(prompt, list) else [None]
    if turns and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in turns):
        return turns
    raise UserError(f"{record.where}: prompt: expected text or turns {{role, content}}, found {prompt!r:.60}")


def _candidates(record: Record) -> tuple[str, ...]:
    found = record.row["candidates"]
    if not isinstance(found, list) or len(found) < 2 or not all(isinstance(c, str) and c for c in found):
        raise UserError(
            f"{record.where}: candidates: expected a list of 2 or more texts that are not empty, found {found!r:.60}"
        )
    if len(set(found)) < len(found):
        raise UserError(f"{record.where}: candidates: two of them are the same: {found!r:.60}")
    return tuple(found)


def _answer(record: Record, candidates: tuple[str, ...]) -> int:
    """From `answer`, or from `label`; a `label` beside it that names a candidate must name the same one."""
    if "answer" not in record.row:
        return _index(record, "label", candidates)
    found = _index(record, "answer", candidates)
    try:
        other = _index(record, "label", candidates) if "label" in record.row else found
    except UserError:
        other = found  # a column of another meaning
    if other != found:
        said = f"label: found {record.row['label']!r:.60}, and answer is {record.row['answer']!r:.60}"
        raise UserError(f"{record.where}: {said}: they name two different candidates; remove one of these columns")
    return found


def _index(record: Record, key: str, candidates: tuple[str, ...]) -> int:
    answer = record.row[key]
    if isinstance(answer, str):
        texts = candidates if answer in candidates else tuple(c.strip() for c in candidates)
        if texts.count(answer) == 1:
            return texts.index(answer)
        raise UserError(f"{record.where}: {key}: {answer!r} is not one of the candidates {list(candidates)}")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(candidates):
        raise UserError(
            f"{record.where}: {key}: expected an index from 0 to {len(candidates) - 1}, or the text of a "
            f"candidate, found {answer!r}"
        )
    return answer
