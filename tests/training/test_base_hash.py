"""The hash of the base model, computed while other things happen, is the hash."""

from pathlib import Path

import pytest

from keyhole.disk import weights_hash
from keyhole.disk.weights_hash import Stopped, content_hash
from keyhole.training.resume import BaseHash, model_hash


def test_it_is_the_content_hash(tiny_model: Path, tmp_path: Path) -> None:
    """Of a directory with weights; None of one without."""
    assert BaseHash(str(tiny_model)).result() == content_hash(tiny_model) == model_hash(str(tiny_model))
    assert BaseHash(str(tmp_path)).result() is None


def test_it_stops_when_nobody_waits(tiny_model: Path) -> None:
    """Asked to stop, hashing ends by an exception of its own."""
    with pytest.raises(Stopped):
        content_hash(tiny_model, lambda: True)


def test_a_failure_is_not_lost(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in the thread is raised where the hash is asked for."""

    def fail(part: object, stop: object) -> str:
        raise MemoryError

    monkeypatch.setattr(weights_hash, "_line", fail)
    with pytest.raises(MemoryError):
        BaseHash(str(tiny_model)).result()
