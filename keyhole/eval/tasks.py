"""Task files: questions with candidate answers, one of which is right.

A row (JSONL, JSON or Parquet; keyhole.data.sources reads it) is

    {"prompt": "The soup was cold.\nStamp:", "candidates": [" blue", " red"], "answer": 1}

    prompt       text, or a chat: a list of {role, content}, rendered by the model's chat template
    candidates   two or more texts; prompt and candidate are joined byte for byte, including the space between them
    answer       the index of the right one, from 0, or its text; the column may also be called `label`

Other columns are ignored, so rows that also have a `completion` can be used as training data too. `demo` is the
embedded task. An invalid row is refused with its file and line before a model is loaded.
"""

import json
from contextlib import suppress
from itertools import islice
from pathlib import Path

from keyhole import assets
from keyhole.data.opened import Record, check_text
from keyhole.data.sources import read
from keyhole.data.tasks.question import Question, Task
from keyhole.errors import UserError, listed


def is_task(source: str) -> bool:
    """Whether the first row of a source has candidates; otherwise it is plain data."""
    first = next(iter(read(assets.locate(source, assets.TEST))))
    return "candidates" in first.row


def read_task(source: str, limit: int | None = None) -> Task:
    """All questions of a file, glob or directory, or the first `limit`."""
    return Task(task_name(source), [_question(r) for r in islice(read(assets.locate(source, assets.TEST)), limit)])


def task_name(source: str) -> str:
    """`demo`, or folder and file without the suffix: data/rte/val.jsonl is rte/val."""
    path = Path(source)
    return source if source == "demo" else f"{path.parent.name}/{path.stem}".lstrip("/")


def _question(record: Record) -> Question:
    row, where = record.row, record.where
    missing = [name for name in ("prompt", "candidates") if name not in row]
    if missing or not ("answer" in row or "label" in row):
        raise UserError(
            f"{where}: a task needs prompt, candidates and answer; {', '.join(missing or ['answer'])} is missing, "
            f"found: {listed(row) or 'nothing'}"
        )
    prompt, candidates = row["prompt"], row["candidates"]
    turns = prompt if isinstance(prompt, list) and prompt else [None]
    if not isinstance(prompt, str) and not all(isinstance(t, dict) and {"role", "content"} <= t.keys() for t in turns):
        raise UserError(f"{where}: prompt: expected text or turns {{role, content}}, found {prompt!r:.60}")
    is_list = isinstance(candidates, list) and len(candidates) > 1
    if not is_list or not all(isinstance(c, str) and c for c in candidates):
        raise UserError(
            f"{where}: candidates: expected a list of 2 or more texts that are not empty, found {candidates!r:.60}"
        )
    if len(set(candidates)) < len(candidates):
        raise UserError(f"{where}: candidates: two of them are the same: {candidates!r:.60}")
    check_text("\n".join([json.dumps(prompt, ensure_ascii=False, default=str), *candidates]), where)
    answer = _index(record, "answer" if "answer" in row else "label", candidates)
    other = answer
    with suppress(UserError):  # a column of another meaning
        other = _index(record, "label", candidates) if "label" in row else answer
    if other != answer:
        said = f"label: found {row['label']!r:.60}, and answer is {row['answer']!r:.60}"
        raise UserError(f"{where}: {said}: they name two different candidates; remove one of these columns")
    return Question(prompt, tuple(candidates), answer, where)


def _index(record: Record, key: str, candidates: list[str]) -> int:
    answer = record.row[key]
    if isinstance(answer, str):
        texts = candidates if answer in candidates else [c.strip() for c in candidates]
        if texts.count(answer) == 1:
            return texts.index(answer)
        raise UserError(f"{record.where}: {key}: {answer!r} is not one of the candidates {candidates}")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(candidates):
        raise UserError(
            f"{record.where}: {key}: expected an index from 0 to {len(candidates) - 1}, or the text of a "
            f"candidate, found {answer!r}"
        )
    return answer
