"""Rows of a table: what is told when one is wrong."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from keyhole.bench.rows import list_of, one_of, read_yaml, row_as
from keyhole.errors import UserError


@dataclass(frozen=True)
class Row:
    name: str
    colour: str = one_of(("red", "blue"))
    count: int = 1
    budget: str | None = None
    options: dict = field(default_factory=dict)


def test_a_good_row_is_a_dataclass() -> None:
    """Defaults fill what is not given."""
    row = row_as(Row, {"name": "a", "colour": "red", "budget": None, "options": {"x": 1}}, "here")
    assert row == Row("a", "red", 1, None, {"x": 1})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a", "here: 'a' is no row; a row has the keys name, colour"),
        ({"name": "a"}, "here: 'colour' is missing"),
        ({"name": "a", "colour": "green"}, "colour: 'green' is not one of red, blue"),
        ({"name": "a", "colour": "red", "color": 1}, "'color' is not one of name, colour, count"),
        ({"name": "a", "colour": "red", "count": "2"}, "count: '2' is not of type int"),
        ({"name": "a", "colour": "red", "count": True}, "count: True is not of type int"),
        ({"name": "a", "colour": "red", "budget": 8}, "budget: 8 is not of type str . None"),
        ({"name": "a", "colour": "red", "options": []}, "options: .. is not of type dict"),
    ],
)
def test_a_mistake_is_told_with_place_key_and_choice(row: Any, message: str) -> None:
    """Nothing is dropped or guessed."""
    with pytest.raises(UserError, match=message):
        row_as(Row, row, "here")


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "trials: []", "trials: {}"])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    """With its name."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml"):
        list_of(read_yaml(path), "trials", str(path))
    with pytest.raises(UserError, match=r"none\.yaml"):
        read_yaml(tmp_path / "none.yaml")
