"""One method on the embedded model; and keyhole's main property: the same run within a budget smaller than the model
gives the same bits.

The embedded model is so small that a batch of notes takes more memory than its weights. So `squeeze` builds a deeper
model with random weights (LAYERS blocks, the same tokenizer and notes) and trains it STEPS steps, twice: with all
weights on the device, and with gpu_memory set to SHARE of the weights alone. The budget must hold everything: slots,
activations, logits, the method's buffers. On a GPU it is enforced; without one the same code runs with plain copies
instead of the link: the losses, the weights and the bytes are the same.

    equal     every loss of every step, and every weight afterwards: the same bits
    crossed   bytes over the link between host and device, up and down
"""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

import keyhole
from keyhole import assets
from keyhole.data.batches import Loader, Padding
from keyhole.data.prepare import prepare
from keyhole.errors import UserError
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.methods.workload import Workload
from keyhole.model.structure.skeleton import read_config
from keyhole.model.structure.source import read_tokenizer
from keyhole.training.schedule import Schedule

MAX_LENGTH = 128
LAYERS, HIDDEN, STEPS, NOTES, LENGTH = 20, 96, 3, 2, 24  # of the deeper model and its batches
SHARE = 0.5  # of its weights


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
    loader = Loader(dataset, settings.batch_size, seed=seed, padding=Padding(1))
    schedule = Schedule("linear", settings.lr, settings.steps)
    losses, times_s, begin_s = [], [], time.perf_counter()
    for step in range(settings.steps):
        method.lr = schedule.rate(step)
        losses.append(float(method.step(loader.next_step())))
        times_s.append(time.perf_counter() - begin_s)
    method.flush()
    return losses, times_s


@dataclass
class Squeezed:
    """The result of one method. skipped: why it could not run."""

    method: str
    skipped: str = ""
    weights_bytes: int = 0
    budget_bytes: int = 0
    planned_bytes: int = 0  # total planned memory, within the budget
    streamed_bytes: int = 0  # of the weights
    up_bytes: int = 0
    down_bytes: int = 0
    seconds: list[float] = field(default_factory=list)  # resident, in the budget
    losses: list[float] = field(default_factory=list)
    same_losses: bool = False
    same_weights: bool = False


def one_of_each_sweep(names: list[str]) -> list[str]:
    """The first streaming method of each kind of sweep."""
    kinds = {METHODS[name].sweep: name for name in reversed(names) if METHODS[name].streams}
    return [name for name in names if name in kinds.values()]


def squeeze(name: str, seed: int = 0, steps: int = STEPS, device: str | None = None) -> Squeezed:
    """Trains twice and compares."""
    made = Squeezed(name)
    try:
        resident, made.losses, seconds = _train_deeper(name, seed, steps, device, None)
        made.weights_bytes = sum(t.numel() * t.element_size() for _, t in resident.named_tensors())
        made.budget_bytes = int(SHARE * made.weights_bytes)
        streamed, losses, in_budget = _train_deeper(name, seed, steps, device, made.budget_bytes)
    except UserError as error:
        made.skipped = str(error)
        return made
    made.seconds = [seconds, in_budget]
    assert streamed.placed is not None
    made.planned_bytes, engine = streamed.placed.device_bytes.total, streamed.engine
    made.streamed_bytes = sum(engine.homes[page].nbytes for page in engine.streamed)
    made.up_bytes, made.down_bytes = engine.bytes_up, engine.bytes_down
    made.same_losses, theirs = made.losses == losses, dict(streamed.named_tensors())
    made.same_weights = all(torch.equal(t.cpu(), theirs[key].cpu()) for key, t in resident.named_tensors())
    for model in (resident, streamed):
        model.close()
    return made


def _train_deeper(
    name: str, seed: int, steps: int, device: str | None, budget: int | None
) -> tuple[keyhole.Model, list[float], float]:
    row, demo, config = METHODS[name], settings_of(name), read_config(str(assets.MODEL))
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = LAYERS, HIDDEN, 3 * HIDDEN
    config.head_dim = HIDDEN // config.num_attention_heads
    settings = row.settings(**demo.options)
    work = Workload(name, NOTES * LENGTH, settings.passes, settings)
    where = {"placement": "resident"} if budget is None else {"placement": "stream", "gpu_memory": budget}
    model = keyhole.load(config, init="random", dtype="float32", device=device, seed=seed, workload=work, **where)
    method = row.load()(model, demo.lr, seed=seed, **demo.options)
    dataset = prepare(str(assets.TRAIN), read_tokenizer(str(assets.MODEL)), max_length=LENGTH)
    loader = Loader(dataset, NOTES, seed=seed, padding=Padding(1))
    began_s = time.perf_counter()
    losses = [float(method.step(loader.next_step())) for _ in range(steps)]
    method.flush()
    model.engine.wait_for_homes()
    return model, losses, time.perf_counter() - began_s
