"""Curves of a fixed size: means and totals are those of the steps, however many there are."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.report.curves import MOST, Curves


def filled(losses: list[float], **more: float) -> Curves:
    curves = Curves()
    for i, loss in enumerate(losses, 1):
        curves.add({"step": i, "loss": loss, "tokens": 10, "seconds": 0.5, **more})
    return curves


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40).flatmap(lambda x: st.integers(1, 80).map(lambda n: x * n))
)
def test_points_stand_for_all_steps_and_stay_few(losses: list[float]) -> None:
    """Whatever the length: at most 2 MOST points, whose sums and ends are those of the steps."""
    curves = filled(losses)
    assert len(curves.points) <= 2 * MOST
    assert sum(point.steps for point in curves.points) == len(losses) == curves.steps
    sums = [point.sums["loss"] for point in curves.points]
    assert sum(row[1] for row in sums) == pytest.approx(sum(losses), rel=1e-9, abs=1e-6)
    assert curves.points[-1].step == curves.last_step == len(losses)
    assert curves.seconds == pytest.approx(0.5 * len(losses)) and curves.tokens == 10 * len(losses)
    assert all(point.steps == curves.width for point in curves.points[:-1])


def test_what_is_no_number_is_left_out() -> None:
    """A diverged step is counted, and its numbers are not drawn."""
    curves = Curves()
    curves.add({"step": 1, "loss": 1.0, "seconds": 1.0, "tokens": 5, "grad_norm": math.nan, "note": "x", "flag": True})
    curves.add({"step": 2, "loss": None, "seconds": 1.0, "tokens": 5, "grad_norm": 2.0})
    assert curves.mean("loss", over_time=False) == ([1.0], [1.0])
    assert curves.mean("grad_norm", over_time=True) == ([2.0], [2.0])
    assert curves.names == ["loss", "grad_norm"] and curves.last_step == 2
    assert curves.losses == [(1, 1.0)]


def test_evaluations_and_tests_are_kept_apart() -> None:
    """An evaluation has the time of the steps before it; the test of a step is no evaluation."""
    curves = filled([2.0, 1.0])
    curves.add({"step": 2, "eval_loss": 1.5, "eval_accuracy": 0.75, "eval_questions": 4})
    curves.add({"step": 2, "test_accuracy": 0.5, "test_questions": 8})
    assert curves.evaluation("eval_accuracy", over_time=True) == ([1.0], [0.75])
    assert curves.evaluation("eval_accuracy", over_time=False) == ([2.0], [0.75])
    assert curves.result("test")[1]["test_accuracy"] == 0.5 and curves.result("eval")[1]["eval_loss"] == 1.5
    assert curves.steps == 2


def test_many_evaluations_are_thinned() -> None:
    """The newest stay, and the older half thins out."""
    curves = Curves()
    for step in range(5000):
        curves.add({"step": step, "eval_loss": float(step)})
    assert len(curves.evaluations) <= 2 * MOST and curves.evaluations[-1][0] == 4999
    assert curves.evaluations[0][0] == 0


def test_the_pace_leaves_out_the_first_step() -> None:
    """It compiles, and is no measure of the others."""
    curves = Curves()
    for step, seconds in enumerate((100.0, 2.0, 2.0), 1):
        curves.add({"step": step, "loss": 1.0, "tokens": 10, "seconds": seconds})
    assert curves.pace == pytest.approx(5.0) and curves.step_seconds == pytest.approx(2.0)
