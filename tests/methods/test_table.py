"""The rows of the table of methods: what they say is what the classes do."""

import inspect
from dataclasses import fields

import pytest

from keyhole.methods import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_a_row_and_its_class_have_the_same_defaults(name: str) -> None:
    """The learning rate and every setting, in a config and from Python."""
    row, found = METHODS[name], {}
    for cls in reversed(row.load().__mro__):
        if "__init__" in vars(cls) and cls is not object:
            found |= {key: p.default for key, p in inspect.signature(cls.__init__).parameters.items()}
    assert found["lr"] == (row.learning_rate if row.usual_rates is None else "usual")
    assert {field.name: field.default for field in fields(row.settings)}.items() <= found.items()
