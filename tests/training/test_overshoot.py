"""The warning that the first steps of plain gradient descent are too long: what it names, and which runs have it."""

from pathlib import Path

import pytest

from keyhole.config import TrainConfig, resolve
from keyhole.training.overshoot import Overshoot
from keyhole.training.start import train


def test_the_steps_of_a_rise_are_named_once() -> None:
    """As measured: the loss of the first went from 3.4 to 12 within 7 steps, that of the second fell at once."""
    rises, falls = Overshoot(), Overshoot()
    told = rises.note(1, 3.45, 5e-3, 87.0)
    assert told is not None and "norm is 87, for which learning_rate=0.005 is too high" in told
    assert "set learning_rate=9e-04, or clip: max_grad_norm=1" in told
    assert rises.note(2, 2.97, 5e-3, 105.0) is None
    assert not any(falls.note(step, *of) for step, of in enumerate([(11.7, 5e-3, 71.0), (2.3, 4.9e-3, 46.0)], 1))


def test_only_the_first_steps_and_large_falls_count() -> None:
    """A small loss has a steep slope for single batches later on; clipping shortens the step; a warm-up begins at 0."""
    assert Overshoot().note(4, 3.45, 5e-3, 87.0) is None
    assert Overshoot().note(1, 0.01, 5e-3, 4.0) is None
    assert Overshoot(max_grad_norm=1.0).note(1, 3.45, 5e-3, 87.0) is None
    assert Overshoot().note(1, 3.45, 0.0, 87.0) is None
    assert "lower it" in (Overshoot(max_grad_norm=50.0).note(1, 3.45, 5e-3, 87.0) or "")


@pytest.mark.parametrize("norm", [float("inf"), float("nan"), 1e200])
def test_a_step_that_is_left_out_is_not_too_long(norm: float) -> None:
    """With float16 the first loss scales are too high, and such gradients are not finite."""
    noticed = Overshoot()
    assert noticed.note(1, 3.45, 5e-3, norm) is None
    assert noticed.note(2, 3.45, 5e-3, 87.0) is not None


def test_it_is_not_said_again_after_a_resume() -> None:
    before = [{"step": 1, "loss": 3.45, "learning_rate": 5e-3, "grad_norm": 87.0}, {"step": 1, "eval_loss": 3.0}]
    gone_on = Overshoot()
    gone_on.recall(before)
    assert gone_on.note(2, 2.97, 5e-3, 105.0) is None


@pytest.mark.parametrize(
    ("changes", "warns"),
    [({"method": "lomo"}, True), ({"method": "lomo", "max_grad_norm": 0.01}, False), ({"method": "adalomo"}, False)],
)
def test_a_run_is_warned_of(tmp_path: Path, changes: dict, warns: bool, capsys: pytest.CaptureFixture) -> None:
    """Where a step is the rate times the gradient."""
    base = {"model": "demo", "train_data": "demo", "output_dir": str(tmp_path), "dtype": "float32", "max_steps": 1}
    config = TrainConfig(**base, learning_rate=20.0, max_length=64, batch_size=2, save_model=False, **changes)
    assert train(resolve(config)[0]) == 0
    assert ("warning: step 1: the gradient's norm is" in capsys.readouterr().out) is warns
