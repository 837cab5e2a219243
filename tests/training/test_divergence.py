"""The warning that the training loss has risen: also of losses that jump, not of noise, the same after a stop."""

import random

import pytest

from keyhole.training.divergence import Divergence
from tests.training.test_metrics import record, recorder


def warnings_of(losses: list[float]) -> dict[int, str]:
    run = Divergence()
    said = {step: run.note(step, loss) for step, loss in enumerate(losses, 1)}
    return {step: text for step, text in said.items() if text is not None}


@pytest.mark.parametrize(
    ("losses", "step", "told"),
    [
        ([7.6, *[45.0] * 5], 5, "from 7.6 at step 1 to 45 at step 5"),
        ([7.6, *[20.0, 30.0, 9.0, 25.0, 30.0] * 3], 13, "from 7.6 at step 1 to 25 at step"),
        ([7.0, 3.0, 2.0, *[1.0] * 37, *[9.0, 2.5, 0.5, 9.0] * 10], 80, "from 1 at step 32 to 2.5 at step"),
    ],
)
def test_a_loss_that_rises_is_noticed(losses: list[float], step: int, told: str) -> None:
    """Once: a plateau, losses that jump from the start or later, with a low one among them."""
    found = warnings_of([*losses, *[losses[-1]] * 20])
    assert len(found) == 1
    ((at, text),) = found.items()
    assert told in text and at <= step


@pytest.mark.parametrize(
    "losses",
    [
        [0.1, 0.4, 0.5, 0.9, 1.0] * 8,
        [2.0, 2.0, 30.0, 2.0, 2.0, 2.0, 30.0, 40.0, 2.0] * 4,
        [11.5, 13.3, 13.3, 12.0, 9.0, 6.0, 4.0, 3.0],
        [2.0] * 40 + [9.0, 1.0] * 20,
        [8.0 - 0.05 * i for i in range(100)],
    ],
)
def test_what_is_no_divergence(losses: list[float]) -> None:
    """A small loss that doubles, single steps, a rise at the beginning that ends, every other loss as ever, a fall."""
    assert not warnings_of(losses)


@pytest.mark.parametrize(("mean", "spread"), [(0.7, 0.3), (2.5, 0.5), (11.5, 1.5)])
def test_noise_is_no_divergence(mean: float, spread: float) -> None:
    """Losses of small batches whose weights hardly change, as those of `zo`."""
    draw = random.Random(0)
    for _ in range(50):
        assert not warnings_of([max(0.0, draw.gauss(mean, spread)) for _ in range(200)])


@pytest.mark.parametrize("stop", [1, 3, 9, 20])
def test_a_run_that_was_stopped_warns_at_the_same_step(stop: int) -> None:
    """The earlier losses come from its file; what was said before the stop is not said again."""
    losses = [2.0, 1.5, 1.0, 1.2, *[9.0, 20.0, 30.0] * 6]
    lines: list[list[str]] = [[], [], []]
    entries: list[dict] = []
    whole, first, second = (recorder(entries if i == 1 else [], warnings=lines[i]) for i in range(3))
    for step, loss in enumerate(losses, 1):
        whole.add(record(step, loss))
        if step <= stop:
            first.add(record(step, loss))
    second.divergence.recall([*entries, {"step": stop, "eval_loss": 9.0}, {"step": stop, "loss": None}])
    for step, loss in enumerate(losses[stop:], stop + 1):
        second.add(record(step, loss))
    assert lines[0] == lines[1] + lines[2] and len(lines[0]) == 1
