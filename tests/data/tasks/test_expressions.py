"""The little programs of a task file: whatever goes wrong in one is an error of the task file."""

import pytest

from keyhole.data.tasks.expressions import Expression, Text
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
        "{{ spans | slices(long) | length }}",
    ],
)
def test_whatever_a_text_raises_names_its_key(source: str) -> None:
    """SyntaxError of the generated code, RecursionError, AttributeError of a filter: all end as UserError."""
    with pytest.raises(UserError, match="^prompt: "):
        Text(source, "prompt").run(ROW)


@pytest.mark.parametrize("source", ["review | dictsort", "review | xmlattr", "none_such", "1 +", "1 / 0"])
def test_whatever_an_expression_raises_names_its_key(source: str) -> None:
    """An expression fails as a text does."""
    with pytest.raises(UserError, match="^let.a: "):
        Expression(source, "let.a").run(ROW)


def test_slices_are_the_marked_pieces() -> None:
    """Both ends of a span belong to it."""
    row = {"text": "Ann met Bob", "spans": [{"start": 0, "end": 2}, {"start": 8, "end": 10}]}
    assert Expression("spans | slices(text)", "x").run(row) == ["Ann", "Bob"]
