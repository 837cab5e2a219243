"""The little programs of a task file: whatever goes wrong in one is an error of the task file."""

import math

import pytest

from keyhole.data.tasks.spec import Expression, Text
from keyhole.errors import UserError

ROW = {"review": "good", "spans": [{"start": 0, "end": 99_999}] * 50_000, "long": "x" * 100_000}


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in [1] %}" * 25 + "x" + "{% endfor %}" * 25,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{{ review | dictsort }}",
        "{{ review | xmlattr }}",
        "{% include '/etc/passwd' %}",
        "{% extends 'x' %}",
        "{{ super() }}",
        "{{ none_such }}",
    ],
)
def test_whatever_a_text_raises_names_its_key(source: str) -> None:
    """SyntaxError of the generated code, RecursionError, AttributeError of a filter: all end as UserError."""
    with pytest.raises(UserError, match="^prompt: "):
        Text(source, "prompt").run(ROW)


def test_slices_are_the_marked_pieces() -> None:
    """Both ends of a span belong to it."""
    row = {"text": "Ann met Bob", "spans": [{"start": 0, "end": 2}, {"start": 8, "end": 10}]}
    assert Expression("spans | slices(text)", "x").run(row) == ["Ann", "Bob"]


def test_listed_refuses_a_text() -> None:
    """Of a text, `answers[0]` is a letter."""
    assert Expression("answers | listed", "x").run({"answers": ["May"]}) == ["May"]
    assert Expression("answers | listed", "x").run({"answers": None}) == []
    with pytest.raises(UserError, match="^x: found 'May', expected a list; a CSV or TSV holds none"):
        Expression("answers | listed", "x").run({"answers": "May"})


@pytest.mark.parametrize("value", [b"caf\xc3\xa9", b"", math.nan, math.inf, None, ["a"], {"a": 1}])
@pytest.mark.parametrize("source", ["{{ x }} It was", "{{ x | trim }}", "{{ 'a' ~ x }}"])
def test_a_value_without_a_text_is_refused(source: str, value: object) -> None:
    """Bytes (texts of Hive in Parquet), missing numbers of pandas: never as Python prints them."""
    with pytest.raises(UserError, match=r"^prompt: found (bytes|not a number|infinite|null|a list|an object)"):
        Text(source, "prompt").run({"x": value})
