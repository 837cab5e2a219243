"""Trackers."""

import importlib.util
from pathlib import Path

import pytest

from keyhole.errors import UserError
from keyhole.training.tracker import require, tracker


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    """Scalars are written under their names; nothing is written without report_to."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker(None, tmp_path, 0).write({"step": 1, "loss": 2.0})
    assert not list(tmp_path.iterdir())
    board = tracker("tensorboard", tmp_path, 0)
    board.write({"step": 1, "loss": 2.0, "learning_rate": 0.5})
    board.write({"step": 2, "loss": 1.0, "learning_rate": 0.25})
    board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert set(events.Tags()["scalars"]) == {"loss", "learning_rate"}


def test_a_missing_tensorboard_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install; who did not ask for it is not bothered."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require(None)
    with pytest.raises(UserError, match=r"report_to: .*pip install"):
        require("tensorboard")
