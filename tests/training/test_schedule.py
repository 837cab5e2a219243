"""Learning rates."""

import math
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

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


@pytest.mark.parametrize(("total", "asked"), [(10, 3), (10, 0.25), (10, 0), (5, 8), (37, 0.1)])
def test_warmup_steps_are_those_of_the_trainer(total: int, asked: float, tmp_path: Path) -> None:
    """Hugging Face's warmup_steps: a number of steps, below 1 a share; it decides where warmup_ratio is set too."""
    theirs = TrainingArguments(str(tmp_path), warmup_steps=asked, use_cpu=True).get_warmup_steps(total)
    assert Schedule("linear", 3e-4, total, warmup_asked=asked).warmup_steps == theirs
    both = Schedule("linear", 3e-4, total, 0.5, warmup_asked=asked)
    assert both.warmup_steps == (theirs if asked else math.ceil(total * 0.5))
    assert both.warmed_up_by(0.5) == Schedule("linear", 3e-4, total, 0.5)
