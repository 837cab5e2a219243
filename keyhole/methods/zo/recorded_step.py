"""One launch per step: the passes of a step over a resident model, captured as one CUDA graph.

On short batches a step of zo is some thousands of small kernels, and the host, which launches them from Python block by
block, is the bottleneck: with graphs of single blocks (model/forward/blocks.py) it still launches the perturbations,
switches between the passes, and makes a copy per block. If every weight is resident, steps on batches of the same shape
do the same work at the same addresses. So the whole step, from the first perturbation to the losses, is recorded once
per shape (model/recorder.py) and replayed from then on. What differs from step to step is in static memory:

    the batch                        copied into static tensors
    the update of step t - 1         its coefficients in a static tensor; the steps t - 1 and t as numbers on the device

    host per step:    copies of the batch, two numbers, one launch, and a few small kernels from losses to coefficients

Within the graph the looks of a pair run beside each other (model/forward/captured.py).

A graph is used only if it gives the same bits as eager execution. The step in which it is captured runs both: first
eagerly, then, from the same weights, the graph; losses and all weights that a step changes must be equal (with low-rank
directions those outside of blocks). Bytes: the activations of one step, in a memory pool that all graphs share; during
capture, these weights twice.
"""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, cast

import torch

from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.methods.step_numbers import StepNumbers
from keyhole.methods.zo.directions import Dense
from keyhole.methods.zo.estimators import Looks
from keyhole.model.batch import DeviceBatch
from keyhole.model.forward.blocks import SMALL_FLOP_WITH_FACTORS
from keyhole.model.forward.captured import Branches, is_plain, left_out, noted
from keyhole.model.forward.memory import activation_bytes, launched_as_graphs
from keyhole.model.recorder import Recorder, Recording, UsersHooks, signature_of, tensors_of, with_tensors
from keyhole.model.spare_memory import SpareMemory
from keyhole.model.structure.layout import Layout

SIGHTS = 3  # a shape is captured in its third step: libraries choose kernels in the first ones
MAX_RECORDINGS = 32
ROOM = 4  # free memory that a capture requires, in multiples of the weights that a step changes


class RecordedSteps:
    """Runs the passes of a method's steps, as CUDA graphs if possible. deferred_update: every step leaves its update to
    the next."""

    def __init__(self, directions: Dense, deferred_update: bool) -> None:
        self.directions, self.update, model = directions, directions.update, directions.model
        possible = model.graphs is not None and not (model.engine.streamed or model.sharded) and deferred_update
        self.possible = possible and not model.classifies and model.ranks.size == 1 and model.formats.codec is None
        self.recorder = Recorder(SpareMemory(model.placed, model.device), MAX_RECORDINGS, SIGHTS)
        self.counted: dict[Hashable, set[int]] = {}  # units whose changed weights a graph counts
        self.hooks = UsersHooks(model.module.modules())
        self.replays = 0
        self.before, self.now = StepNumbers(model.device), StepNumbers(model.device)
        self.coef = torch.empty(0)
        self.branches: Branches | None = None
        self.version = directions.version

    def run(self, looks: Looks) -> list[torch.Tensor]:
        """The losses of all passes; applies the pending update. Read them before the next step."""
        recorder = self.recorder
        if self.version != self.directions.version:  # recordings read memory that is used no more
            self.version = self.directions.version
            recorder.forget()
        key = self._key(looks)
        if key is None or not recorder.is_due(key) or not recorder.may_run(key):
            return self.directions.run(looks)
        if (recording := recorder.recordings.get(key)) is None:
            return self._record(key, looks)
        self._stage(key, looks)
        nll, _ = recording.replay()
        self.replays += 1
        self.update.replayed(self.counted[key])
        return cast(list[torch.Tensor], nll)

    def _key(self, looks: Looks) -> Hashable:
        """Equal for steps that one graph can serve; None unless every unit lacks exactly the last update, and no
        checkpoint or gate observes the step."""
        engine, layout = self.directions.model.engine, self.directions.model.layout
        observed = engine.watch is not None or engine.gate is not None
        if observed or not self.possible or self.hooks.any() or not self.update.is_usual:
            return None
        tokens = max((batch.inputs["input_ids"].numel() for batch in looks.batches), default=0)
        if tokens == 0 or not is_short(layout, tokens, looks.looks, self.directions.looks_at_once):
            return None
        addresses = tuple(home.data_ptr() for home in engine.homes)
        noise, eps = self.update.noise, self.directions.eps
        settings = noise.seed, noise.distribution, noise.rounding, self.update.waiting[-1].weight_decay, eps
        shapes = tuple(signature_of(opened(batch)) for batch in looks.batches)
        return None if None in shapes else (tuple(looks.pairs), shapes, addresses, settings)

    def _stage(self, key: Hashable, looks: Looks) -> Looks:
        """Writes the batch, the pending update and the step numbers to static memory; returns the same looks at the
        batch there."""
        pending = self.update.waiting[-1]
        if not self.coef.numel():
            self.coef = torch.empty_like(pending.coef)
        self.coef.copy_(pending.coef)
        self.before.set(0.0, cast(int, pending.step))
        self.now.set(0.0, cast(int, self.directions.step))  # on the device within `captured` only
        tensors = tensors_of([opened(batch) for batch in looks.batches])
        static = iter(self.recorder.copy_in(key, tensors))
        return replace(looks, batches=[closed(batch, with_tensors(opened(batch), static)) for batch in looks.batches])

    def _record(self, key: Hashable, looks: Looks) -> list[torch.Tensor]:
        """Runs a step eagerly, and captures it; keeps the graph if it gives the same bits."""
        directions, update, model = self.directions, self.update, self.directions.model
        homes = [home for i, home in enumerate(model.engine.homes) if i not in directions.untouched]
        self.recorder.recordings[key] = None
        if not self._has_room(homes, looks):
            self.recorder.why = "there is not enough free memory"
            return directions.run(looks)
        static = self._stage(key, looks)
        state = [*homes, update.changed]
        before = [x.clone() for x in state]
        blocks = model.blocks if is_plain(looks.passes) else []
        with noted(blocks) as without_mask:
            expected = directions.run(looks)
        after = [x.clone() for x in state]
        try:
            restore(state, before)
            with update.trial(self.coef, self.before.step), left_out(blocks, without_mask):
                made = self._capture(static, state)
                self.counted[key] = set(update.counted)
            self.recorder.verify(key, made, [expected, after])
            return expected
        finally:
            restore(state, after)

    def _capture(self, looks: Looks, state: list[torch.Tensor]) -> Recording | None:
        """Enqueues the step on a capturing stream; nothing is computed."""
        directions, model = self.directions, self.directions.model
        self.branches = self.branches or Branches(model.device)
        self.branches.forked.clear()
        try:
            with directions.captured(self.now.step, self.branches):
                return self.recorder.capture(lambda: [directions.run(looks, steady=False), state])
        finally:
            if model.device.type == ACCELERATOR:
                model.engine.compute = accelerator.current_stream(model.device)

    def _has_room(self, homes: list[torch.Tensor], looks: Looks) -> bool:
        """homes: those that a step changes."""
        model = self.directions.model
        tokens = max(batch.inputs["input_ids"].numel() for batch in looks.batches)
        count = looks.looks if self.directions.looks_at_once else 1  # of looks that pass a block together
        moving = activation_bytes(model.layout, tokens * count, len(looks.passes) // count, model.dtype.itemsize)
        return self.recorder.spare.has(ROOM * sum(home.nbytes for home in homes) + 2 * moving)


def is_short(layout: Layout, tokens: int, looks: int, low_rank: bool) -> bool:
    """Whether the host would be the bottleneck of a pass over so many tokens. With low-rank directions a pass carries
    all looks, by more and smaller kernels."""
    at_once = low_rank and launched_as_graphs(layout, tokens * looks, SMALL_FLOP_WITH_FACTORS)
    return at_once or launched_as_graphs(layout, tokens)


def restore(state: list[torch.Tensor], kept: list[torch.Tensor]) -> None:
    """Restores the weights."""
    for home, old in zip(state, kept, strict=True):
        home.copy_(old)


def opened(batch: DeviceBatch) -> dict[str, Any]:
    """A batch as plain values."""
    return vars(batch) | {"loss": vars(batch.loss)}


def closed(batch: DeviceBatch, values: dict[str, Any]) -> DeviceBatch:
    """The batch with these plain values."""
    return replace(batch, **values | {"loss": replace(batch.loss, **values["loss"])})
