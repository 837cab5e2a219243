"""Notes the calls of an op."""

from typing import Any

import pytest

from keyhole import ops


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str = "correct") -> list[bool]:
    """Of each call: whether it had a residual."""
    calls: list[bool] = []
    call = getattr(ops, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args) > 4 and args[4] is not None)
        return call(*args, **kwargs)

    monkeypatch.setattr(ops, name, noted)
    return calls
