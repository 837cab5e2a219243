"""What is checked while a run trains: that every trained tensor changes, and that the loss does not rise far."""

import re
from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.training.checks import SAMPLE, Divergence, sample, samples, verdict
from keyhole.training.metrics import Reading


def test_names_the_tensors_that_stood_still(tiny_model: Path) -> None:
    """Tensors that are not touched are named; the embedding is not looked at."""
    model = keyhole.load(tiny_model, device="cpu")
    before = dict(samples(model))
    for name, tensor in model.named_tensors():
        if name not in ("model.norm.weight", model.layout.table.name):
            tensor.view(-1)[:1] += 1.0
    line = verdict(model, before, dict(samples(model)), 3)
    assert "1 of 20 trained tensors did not change in 3 steps (model.norm.weight)" in line
    assert 0 < float(re.search(r"([\d.]+) % of the sampled", line)[1]) < 100


def test_sample_is_small_and_compares_bits() -> None:
    """A sample never holds more than SAMPLE elements, and -0.0 differs from 0.0."""
    big = torch.zeros(1000, 1000, dtype=torch.bfloat16)
    before = sample(big)
    assert SAMPLE // 2 < before.numel() <= SAMPLE
    big[0, 0] = -0.0
    assert int((sample(big) != before).sum()) == 1


def warnings_of(losses: list[float]) -> dict[int, str]:
    watch = Divergence(print)
    found = {step: watch.warning({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)}
    return {step: text for step, text in found.items() if text is not None}


@pytest.mark.parametrize(
    ("losses", "step", "told"),
    [
        ([7.6, *[45.0] * 5], 5, "from 7.6 at step 1 to 45 at step 5"),
        ([7.6, *[20.0, 30.0, 9.0, 25.0, 30.0] * 3], 13, "from 7.6 at step 1 to 20 at step"),
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


@pytest.mark.parametrize("stop", [1, 3, 9, 20])
def test_a_run_that_was_stopped_warns_at_the_same_step(stop: int) -> None:
    """The earlier losses come from its file; what was said before the stop is not said again."""
    entries = [
        {"step": step, "loss": loss} for step, loss in enumerate([2.0, 1.5, 1.0, 1.2, *[9.0, 20.0, 30.0] * 6], 1)
    ]
    lines: list[list[str]] = [[], [], []]
    whole, first = Divergence(lines[0].append), Divergence(lines[1].append)
    second = Divergence(lines[2].append, [*entries[:stop], {"step": stop, "eval_loss": 9.0}])
    for run, seen in ((whole, entries), (first, entries[:stop]), (second, entries[stop:])):
        for entry in seen:
            run.note(Reading(entry))
    assert lines[0] == lines[1] + lines[2] and len(lines[0]) == 1
