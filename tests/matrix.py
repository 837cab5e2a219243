"""Properties that hold over a matrix of cases, such as families times methods times dtypes.

`make test` runs of each matrix a covering set: the values and pairs that go through code of their own. Every method,
and every family, is in it somewhere. The other cases have the mark `matrix`; `make matrix` runs them.

    @in_every_run(lambda name, dtype: dtype == "bfloat16" or name == "llama")
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", NAMES)
    def test_streamed_equals_resident(name, dtype): ...
"""

import inspect
from collections.abc import Callable, Iterable

import pytest


def in_every_run(kept: Callable[..., bool]) -> pytest.MarkDecorator:
    """Of a parametrized test: the cases of `make test`. kept: of some of the parameters, by their names."""
    return pytest.mark.in_every_run.with_args(kept)


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Gives the mark `matrix` to the cases that in_every_run leaves out."""
    for item in items:
        for mark in item.iter_markers("in_every_run"):
            kept = mark.args[0]
            cases = item.callspec.params  # type: ignore[attr-defined]
            if not kept(**{name: cases[name] for name in inspect.signature(kept).parameters}):
                item.add_marker(pytest.mark.matrix)
