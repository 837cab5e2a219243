"""Prompts from any table: what is written, and what is refused with file, row and column."""

import json
from pathlib import Path
from typing import Any

import pytest

from keyhole.data.examples import RowTemplate
from keyhole.data.opened import Record
from keyhole.data.prepare import prepare
from keyhole.data.settings import DataSettings
from keyhole.errors import UserError
from tests.conftest import build_tokenizer


def row(**cells: Any) -> Record:
    return Record("t.csv", "line", 2, cells)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{sentence} It was", "A fine film. It was"),
        ("{ sentence }|{n}|{ok}", "A fine film.|3|true"),
        ("{{{Customer name}}}", "{Ann}"),
        ("{a.b}\n{sentence}", "x\nA fine film."),
    ],
)
def test_cells_are_written_where_their_columns_stand(text: str, expected: str) -> None:
    cells = {"sentence": "A fine film.", "n": 3, "ok": True, "Customer name": "Ann", "a.b": "x"}
    assert RowTemplate(text, "prompt").fill(row(**cells)) == expected


@pytest.mark.parametrize(
    ("text", "cells", "says"),
    [
        ("{sentense}", {"sentence": "a"}, "t.csv, line 2: prompt: there is no column 'sentense'.*did you mean"),
        ("{x}", {"x": None}, "column 'x' is null"),
        ("{x}", {"x": [1]}, "column 'x' is a list"),
    ],
)
def test_what_is_no_text_is_refused(text: str, cells: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        RowTemplate(text, "prompt").fill(row(**cells))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prompt": "{sentence"}, "expected '}'"),
        ({"prompt": "a } b {x}"}, "Single '}'"),
        ({"completion": "label"}, "completion: .* names no column"),
        ({"prompt": "{x}", "data_format": "messages"}, "leave data_format out"),
    ],
)
def test_templates_are_checked_before_data_are_read(settings: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        DataSettings(**settings)


def test_a_table_becomes_prompt_and_completion(tmp_path: Path) -> None:
    """The same tokens as if the file had the two columns; renamed columns go by their new names."""
    table, plain = tmp_path / "reviews.csv", tmp_path / "plain.jsonl"
    table.write_text('Review,stars,note\n"Warm, fresh bread.",5,\n"Cold soup.",1,late\n')
    pairs = [("Warm, fresh bread. Stars:", " 5"), ("Cold soup. Stars:", " 1")]
    plain.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs))
    tokenizer = build_tokenizer()
    how = {"prompt": "{text} Stars:", "completion": " {stars}", "columns": {"text": "Review"}}
    made, expected = prepare(str(table), tokenizer, **how), prepare(str(plain), tokenizer)
    assert made.ids.tolist() == expected.ids.tolist() and made.trained.tolist() == expected.trained.tolist()
    assert "prompt and completion from columns" in made.report.formats[str(table)]


def test_a_prompt_without_an_answer_is_refused_with_the_setting_that_makes_one(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("sentence,label\na,1\n")
    with pytest.raises(UserError, match="column completion is missing.*completion: ' {label}'"):
        prepare(str(table), build_tokenizer(), prompt="{sentence} It was")
