"""A JSON file of unknown origin is read, or refused with its name; nothing else suffers from it."""

import gc
import sys
from pathlib import Path

import pytest

from keyhole.disk.read_json import read_json
from keyhole.errors import UserError


class Garbage:
    """Found by a collection alone; its finalizer needs much of the depth that Python has."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        def down(levels: int) -> None:
            if levels:
                down(levels - 1)

        down(sys.getrecursionlimit() // 2)


def test_garbage_is_not_collected_at_the_recursion_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a parser gives up, finalizers of unrelated objects would fail."""
    path, failed = tmp_path / "deep.json", []
    path.write_text('{"a":' * 100_000)
    monkeypatch.setattr(sys, "unraisablehook", lambda fault: failed.append(fault.exc_type))
    before = gc.get_threshold()
    gc.collect()
    gc.disable()
    Garbage()
    try:
        gc.set_threshold(gc.get_count()[0] + 600)  # a collection is due when some 600 brackets are open
        gc.enable()
        with pytest.raises(UserError, match=r"deep.json cannot be read: its brackets are nested too deeply"):
            read_json(path, "config")
    finally:
        gc.set_threshold(*before)
        gc.collect()
    assert not failed
