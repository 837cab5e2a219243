"""Shows keyhole's main property: the same run within a budget smaller than the model gives the same bits.

The embedded model is so small that a batch of notes takes more memory than its weights. So this part of the demo builds
a deeper model with random weights (LAYERS blocks, the same tokenizer and notes) and trains it STEPS steps, twice, with
one method of forward sweeps and with one of reverse sweeps: with all weights on the device, and with gpu_memory set to
SHARE of the weights alone. The budget must hold everything: slots, activations, logits, the method's buffers.

    equal     every loss of every step, and every weight afterwards: the same bits
    crossed   bytes over the link between host and device, up and down

On a GPU the budget is enforced. Without a GPU the same code runs with plain copies instead of the link: the losses, the
weights and the bytes are the same.
"""

import time
from dataclasses import dataclass, field

import torch

import keyhole
from keyhole import assets
from keyhole.data.dataset import Dataset
from keyhole.data.loader import Loader
from keyhole.data.prepare import prepare
from keyhole.demo.train import settings_of
from keyhole.errors import UserError
from keyhole.methods import METHODS
from keyhole.methods.workload import Workload
from keyhole.model.structure.skeleton import read_config
from keyhole.model.structure.tokenizer import read_tokenizer
from keyhole.offload.slots import page_bytes

LAYERS, HIDDEN, STEPS, NOTES, LENGTH = 20, 96, 3, 2, 24
SHARE = 0.5  # of the weights


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


def shown(names: list[str]) -> list[str]:
    """The first streaming method of each kind of sweep."""
    kinds: dict[str, str] = {}
    for name in names:
        if METHODS[name].streams:
            kinds.setdefault(METHODS[name].sweep, name)
    return list(kinds.values())


def squeeze(name: str, seed: int = 0, steps: int = STEPS, device: str | None = None) -> Squeezed:
    """Trains twice and compares."""
    made = Squeezed(name)
    try:
        dataset = _notes()
        resident, losses, seconds = _train(name, dataset, seed, steps, device, None)
        made.losses, made.seconds = losses, [seconds]
        made.weights_bytes = sum(t.numel() * t.element_size() for _, t in resident.named_tensors())
        made.budget_bytes = int(SHARE * made.weights_bytes)
        streamed, losses, seconds = _train(name, dataset, seed, steps, device, made.budget_bytes)
    except UserError as error:
        made.skipped = str(error)
        return made
    made.seconds.append(seconds)
    assert streamed.placed is not None
    made.planned_bytes = streamed.placed.device_bytes.total
    engine = streamed.engine
    made.streamed_bytes = sum(page_bytes(engine.homes[page]) for page in engine.streamed)
    made.up_bytes, made.down_bytes = engine.bytes_up, engine.bytes_down
    made.same_losses = made.losses == losses
    theirs = dict(streamed.named_tensors())
    made.same_weights = all(torch.equal(t.cpu(), theirs[key].cpu()) for key, t in resident.named_tensors())
    for model in (resident, streamed):
        model.close()
    return made


def _notes() -> Dataset:
    return prepare(str(assets.TRAIN), read_tokenizer(str(assets.MODEL)), max_length=LENGTH)


def _train(
    name: str, dataset: Dataset, seed: int, steps: int, device: str | None, budget: int | None
) -> tuple[keyhole.Model, list[float], float]:
    row = METHODS[name]
    config = read_config(str(assets.MODEL))
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = LAYERS, HIDDEN, 3 * HIDDEN
    config.head_dim = HIDDEN // config.num_attention_heads
    demo = settings_of(name)
    settings = row.settings(**demo.options)
    work = Workload(name, NOTES * LENGTH, settings.passes, settings)
    where = {"placement": "resident"} if budget is None else {"placement": "stream", "gpu_memory": budget}
    model = keyhole.load(config, init="random", dtype="float32", device=device, seed=seed, workload=work, **where)
    method = row.load()(model, demo.lr, seed=seed, **demo.options)
    loader = Loader(dataset, NOTES, seed=seed, pad_to_multiple_of=1)
    began_s = time.perf_counter()
    losses = [float(method.step(loader.next_step())) for _ in range(steps)]
    method.flush()
    model.engine.wait_for_homes()
    return model, losses, time.perf_counter() - began_s
