"""Task files: what is read, and what a wrong row is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from keyhole.errors import UserError
from keyhole.eval.evaluate import is_task, read_task, task_name
from scripts.demo_model.task import make_rows, rows_as_jsonl

GOOD = {"prompt": "2 + 2 =", "candidates": [" 4", " 5"], "answer": 0}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("answer", "index"),
    [
        ({"answer": 1}, 1),
        ({"label": 1}, 1),
        ({"answer": 1, "label": "positive"}, 1),
        ({"answer": 1, "label": "5"}, 1),
        ({"answer": " 5"}, 1),
        ({"answer": "5"}, 1),
        ({"label": "4"}, 0),
    ],
)
def test_the_right_answer_by_index_or_text(tmp_path: Path, answer: dict, index: int) -> None:
    """`answer` or `label`, an index or the text with or without its space, all mean the same candidate."""
    row = {"prompt": "2 + 2 =", "candidates": [" 4", " 5"]} | answer
    task = read_task(write(tmp_path / "sums.jsonl", row, row))
    assert [q.answer for q in task.questions] == [index, index]
    assert task.questions[1].where.endswith("sums.jsonl, line 2")
    assert task.questions[0].prompt == "2 + 2 =" and task.questions[0].candidates == (" 4", " 5")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answer": 2}, "none of  2 is one of the candidates"),
        ({"answer": -1}, "none of  -1 is one of"),
        ({"answer": True}, "none of  True is one of"),
        ({"answer": 1.0}, "none of  1.0 is one of"),
        ({"answer": "6"}, "none of  6 is one of"),
        ({"answer": None}, "found null"),
        ({"candidates": [" 4"]}, "2 to 1000 texts"),
        ({"candidates": " 4"}, "a list of 2 to 1000 texts"),
        ({"candidates": [" 4", ""]}, "texts that are not empty"),
        ({"candidates": [" 4", " 4"]}, "the same"),
        ({"prompt": 7}, "expected text or turns"),
        ({"prompt": [{"role": "user"}]}, "expected text or turns"),
        ({"prompt": []}, "expected text or turns"),
        ({"prompt": None}, "expected text or turns"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, change: dict, says: str) -> None:
    path = write(tmp_path / "sums.jsonl", GOOD, GOOD | change)
    with pytest.raises(UserError, match=f"sums.jsonl, line 2: .*{says}"):
        read_task(path)


@pytest.mark.parametrize("missing", ["prompt", "candidates", "answer"])
def test_a_missing_column_is_named(tmp_path: Path, missing: str) -> None:
    row = {key: value for key, value in GOOD.items() if key != missing}
    path = write(tmp_path / "sums.jsonl", GOOD, row)
    with pytest.raises(UserError, match=rf"line 2: .*needs the column {missing}.*; found: {', '.join(row)}"):
        read_task(path)


def test_tasks_and_data_are_told_apart(tmp_path: Path) -> None:
    """A file is a task when its first row has candidates."""
    assert is_task(write(tmp_path / "a.jsonl", GOOD))
    assert not is_task(write(tmp_path / "b.jsonl", {"prompt": "2 + 2 =", "completion": " 4"}))
    with pytest.raises(UserError, match="no such file"):
        is_task(str(tmp_path / "c.jsonl"))


def test_the_embedded_task_is_a_task_file(tmp_path: Path) -> None:
    """Rows of the demo, which are training data too, read as questions; `limit` reads the first ones only."""
    rows = make_rows()[1][:6]
    path = tmp_path / "test.jsonl"
    path.write_text(rows_as_jsonl(rows))
    assert [q.answer for q in read_task(str(path)).questions] == [row["label"] for row in rows]
    assert len(read_task(str(path), limit=4).questions) == 4


def test_names() -> None:
    """Folder and file: rte/val and cb/val are different tasks."""
    assert task_name("data/rte/val.jsonl") == "rte/val"
    assert task_name("val.jsonl") == "val"
    assert task_name("demo") == "demo"
