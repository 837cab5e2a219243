"""A run that goes on pads its batches as it began, also one that began before there was a setting."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from keyhole.data.epoch import Padding
from keyhole.errors import UserError
from keyhole.training.loop import Run
from keyhole.training.start import train
from tests.training.runs import Make


@pytest.fixture
def ragged(tmp_path: Path) -> str:
    """Rows of 13 to 120 tokens: auto pads them to multiples of 16."""
    path = tmp_path / "ragged.jsonl"
    texts = [{"prompt": "ab" * (4 + 9 * i % 53), "completion": f" {i}"} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    return str(path)


@pytest.fixture
def paddings(monkeypatch: pytest.MonkeyPatch) -> list[Padding]:
    """The padding of every run, of training and of held-out data, in order."""
    seen, real = [], Run.go
    monkeypatch.setattr(
        Run, "go", lambda run: seen.append((run.data.train.padding, run.data.eval.padding)) or real(run)
    )
    return seen


def test_auto_is_kept_and_resume_is_exact(make: Make, ragged: str, stopped_is_whole: Callable, paddings: list) -> None:
    """N steps, a stop and M more are N + M steps, with batches that are padded to few widths."""
    how = {"train_data": ragged, "eval_data": ragged, "eval_steps": 2}
    stopped_is_whole(make("through", **how), make("stopped", **how), 3)
    assert len(set(paddings)) == 1 and paddings[0][0].multiple == 16 and paddings[0][0].most is not None


def test_another_number_within_a_run_is_refused(make: Make) -> None:
    """The steps so far and those to come would not be one run."""
    config = make(save_steps=3, max_steps=3)
    assert train(config) == 0
    with pytest.raises(UserError, match=r"pad_to_multiple_of: the run has auto, the config now says 64"):
        train(replace(config, pad_to_multiple_of=64, max_steps=6), resume="")


@pytest.mark.parametrize("kept", [["auto", 0, None], ["auto", 8], 8, ["x", 8, None], ["auto", True, None]])
def test_an_edited_padding_is_refused(make: Make, kept: object) -> None:
    """What no run could have written is named."""
    from keyhole.config.data import data_settings

    with pytest.raises(UserError, match="padding of the batches cannot be true"):
        data_settings(make(), {"padding": kept})
