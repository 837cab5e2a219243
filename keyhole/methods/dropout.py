"""The model's own dropout, and its router noise, while a first-order method trains it: on, as in Hugging Face's
Trainer, and reproducible.

Modules are in training mode during a step and in evaluation mode otherwise. Masks come from torch's generators. Their
state is set per micro-batch: it is seeded by (seed, step, micro-batch) when the pass begins, saved when the pass
returns the turn, and restored when it continues. So passes in lockstep do not draw each other's numbers, however blocks
are cut into units: streamed equals resident, and a resumed run equals one that was not stopped. A block that is
recomputed in the backward pass starts from the state of its first run (model/backward/tape.py). The generators of the
caller do not change.

A step that ends in an error is not counted, so the same step tried again has the same masks.

A model with neither stays in evaluation mode, with the same bits. Zeroth-order passes never use dropout: the
difference of two losses would be dominated by their masks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.model.model import Model

GeneratorStates = tuple[torch.Tensor, torch.Tensor | None]  # of the CPU and of the device
STEPS, PASSES = 2**32, 2**16
KEY = "dropout_step"


def dropout_rates(module: nn.Module) -> dict[str, float]:
    """The rates of dropout and of router noise in training: "OPTDecoderLayer.dropout" -> 0.1."""
    found: dict[str, float] = {}
    for part in module.modules():
        own = {"p": part.p} if isinstance(part, nn.Dropout) else vars(part)
        named = {key: rate for key, rate in own.items() if key == "p" or "drop" in key or "jitter" in key}
        rates = {key: rate for key, rate in named.items() if type(rate) in (int, float) and rate != 0}
        found |= {f"{type(part).__name__}.{key}": rate for key, rate in rates.items()}
    return found


class ModelDropout:
    """Dropout of a model during the steps of one method. wanted=False: evaluation mode always."""

    def __init__(self, model: Model, seed: int, wanted: bool = True) -> None:
        self.module, self.device, self.seed = model.module, model.device, seed
        self.rates = dropout_rates(model.module)
        for name, rate in self.rates.items() if wanted else ():
            if not 0 <= rate <= 1:
                raise UserError(
                    f"model: {name} is {str(rate)[:40]}; a share from 0 to 1 is needed: change it in the model's "
                    "config.json, or set model_dropout=false"
                )
            if "layerdrop" in name:
                raise UserError(
                    f"model: {name}={rate:g} leaves out whole blocks at random, which is not done here; set layerdrop "
                    "to 0 in the model's config.json, or model_dropout=false"
                )
        self.of_model = wanted and bool(self.rates)
        self.parts: list[nn.Module] = []  # further dropout, of adapters
        self.steps = 0
        self.states: dict[int, GeneratorStates] = {}  # of passes that do not have the turn

    @property
    def active(self) -> bool:
        return self.of_model or bool(self.parts)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context for one step: modules are in training mode, if there is any dropout."""
        if not self.active:
            yield
            return
        modules = [part for root in ([self.module] if self.of_model else self.parts) for part in root.modules()]
        before = [part.training for part in modules]
        for part in modules:
            part.training = True
        try:
            with self.counted():
                yield
        finally:
            for part, training in zip(modules, before, strict=True):
                part.training = training

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A context for the random numbers of one step: no pass has drawn yet. After an error the step does not
        count."""
        self.steps += 1
        self.states.clear()
        try:
            yield
        except BaseException:
            self.steps -= 1
            raise

    @contextmanager
    def turn(self, index: int) -> Iterator[None]:
        """A context in which the pass of one micro-batch runs, with its own random numbers."""
        if not self.active:
            yield
            return
        outside = self._get()
        if index in self.states:
            self._set(self.states[index])
        else:
            self._seed((self.seed * STEPS + self.steps) * PASSES + index)
        try:
            yield
        finally:
            self.states[index] = self._get()
            self._set(outside)

    def _get(self) -> GeneratorStates:
        cuda = accelerator.get_rng_state(self.device) if self.device.type == ACCELERATOR else None
        return torch.get_rng_state(), cuda

    def _set(self, states: GeneratorStates) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            accelerator.set_rng_state(states[1], self.device)

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed % 2**63)
        if self.device.type == ACCELERATOR:
            accelerator.default_generators[self.device.index or 0].manual_seed(seed % 2**63)

    def describe(self) -> list[str]:
        """Lines for the start block."""
        lines = ["dropout of the adapters: drawn from (seed, step, micro-batch)"] if self.parts else []
        if self.rates:
            rates = ", ".join(f"{name} {rate:g}" for name, rate in self.rates.items())
            how = "drawn from (seed, step, micro-batch)" if self.of_model else "off (model_dropout=false)"
            lines.insert(0, f"dropout of the model: {rates}; {how}")
        return lines

    def state_dict(self) -> dict[str, int]:
        return {KEY: self.steps} if self.active else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """UserError if only one of the two runs uses dropout."""
        if self.active != (KEY in state):
            ran, fix = ("without", "false") if self.active else ("with", "true")
            raise UserError(f"model_dropout: the checkpoint's steps were made {ran} dropout; set model_dropout={fix}")
        self.steps = int(state.get(KEY, 0))
