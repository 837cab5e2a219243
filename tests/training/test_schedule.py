"""Learning rates."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from keyhole.training.schedule import Schedule

THEIRS = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine_with_min_lr",
}
FLOOR = 0.1


def kwargs(kind: str) -> dict[str, float]:
    return {"min_lr_rate": FLOOR} if kind == "cosine_with_min_lr" else {}


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize(("total", "ratio"), [(1, 0.0), (10, 0.0), (37, 0.1), (100, 0.25), (8, 1.0)])
def test_equals_transformers(kind: str, total: int, ratio: float) -> None:
    """Every rate of a run is the one transformers' scheduler gives, to the last bit."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    theirs = get_scheduler(THEIRS[kind], optimizer, math.ceil(total * ratio), total, kwargs(kind))
    for step in range(total):
        assert Schedule(kind, 3e-4, total, ratio, FLOOR).rate(step) == theirs.get_last_lr()[0]
        optimizer.step()
        theirs.step()


@given(st.sampled_from(list(THEIRS)), st.integers(1, 300), st.floats(0, 1), st.floats(1e-9, 1.0))
def test_never_above_the_peak_or_below_zero(kind: str, total: int, ratio: float, peak: float) -> None:
    """A rate lies between 0 and the peak, and rises to the peak during warm-up."""
    schedule = Schedule(kind, peak, total, ratio, FLOOR)
    rates, warm = [schedule.rate(step) for step in range(total)], schedule.warmup_steps
    assert all(0 <= rate <= peak for rate in rates)
    assert rates[:warm] == sorted(rates[:warm])
    assert warm >= total or rates[warm] == peak
