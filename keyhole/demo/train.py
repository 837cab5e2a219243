"""One method on the embedded model: its set-up, the training loop, and the result."""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

import keyhole
from keyhole import assets
from keyhole.data.loader import Loader
from keyhole.data.prepare import prepare
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.training.schedule import Schedule

MAX_LENGTH = 128


@dataclass(frozen=True)
class Demo:
    """How a method trains here (methods.yaml)."""

    steps: int = 100
    lr: float = 1e-3
    batch_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """The result of one method. `skipped` says why it could not run; the numbers are then meaningless."""

    method: str
    settings: Demo
    skipped: str = ""
    accuracy_before: float = 0.0
    accuracy_after: float = 0.0
    loss_before: float = 0.0
    loss_after: float = 0.0
    host_bytes: int = 0
    gpu_bytes: int = 0
    moved_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.times_s[-1] if self.times_s else 0.0


def settings_of(name: str, steps: int | None = None) -> Demo:
    """The settings of a method in the demo; `steps` limits its steps."""
    table = yaml.safe_load(Path(__file__).with_name("methods.yaml").read_text())
    settings = Demo(**table.get(name, {}))
    return settings if steps is None else replace(settings, steps=min(steps, settings.steps))


def start(name: str, settings: Demo, seed: int, device: str | None) -> tuple[keyhole.Model, Method]:
    """The embedded model, fresh, and the method that will train it."""
    model = keyhole.load(assets.MODEL, dtype="float32", device=device)
    return model, METHODS[name].load()(model, settings.lr, seed=seed, **settings.options)


def train(model: keyhole.Model, method: Method, settings: Demo, seed: int) -> tuple[list[float], list[float]]:
    """The training loop: a rate, a batch, a step. Returns the loss of each step, and the seconds until it was done."""
    dataset = prepare(str(assets.TRAIN), model.tokenizer, max_length=MAX_LENGTH)
    loader = Loader(dataset, settings.batch_size, seed=seed, pad_to_multiple_of=1)
    schedule = Schedule("linear", settings.lr, settings.steps)
    losses, times_s, begin_s = [], [], time.perf_counter()
    for step in range(settings.steps):
        method.lr = schedule.rate(step)
        losses.append(float(method.step(loader.next_step())))
        times_s.append(time.perf_counter() - begin_s)
    method.flush()
    return losses, times_s
