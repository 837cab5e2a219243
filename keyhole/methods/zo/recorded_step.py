"""One launch per step: the passes of a step over a resident model, captured as one CUDA graph.

On short batches a step of zo is some thousands of small kernels, and the host, which launches them from Python block by
block, is the bottleneck: with graphs of single blocks (model/forward/graphs.py) it still launches the perturbations,
switches between the passes, and makes a copy per block. If every weight is resident, steps on batches of the same shape
do the same work at the same addresses. So the whole step, from the first perturbation to the losses, is captured once
per shape and replayed from then on. The kernels read what differs from step to step from device memory:

    the batch                        copied into static tensors
    the update of step t - 1         its coefficients in a static tensor; the steps t - 1 and t as numbers on the device

    host per step:    copies of the batch, two numbers, one launch, and a few small kernels from losses to coefficients

Within the graph the looks run beside each other (model/forward/branches.py): those of a pair, and if the copies of a
unit for every pair fit into SHARE of the free memory, those of all pairs.

A graph is used only if it gives the same bits as eager execution. The step in which it is captured runs both: first
eagerly, then, from the same weights, the graph; losses and all weights must be equal. A shape that fails (the model
reads a number on the host, or memory runs out) runs eagerly from then on.

With low-rank directions (low_rank/) a step is captured as well, except for the first step of a period, which folds. If
factors are kept, they are at the same addresses for several periods; then all recordings are dropped and made anew.

These also run eagerly: the first steps of a shape, steps while a checkpoint watches the weights or a module has a hook
of the user's, streamed units, several ranks, and shapes for which a budget has no room beside the step that was
planned. Bytes: the activations of one step, in a memory pool that all graphs share; during capture, the weights that a
step changes twice. With low-rank directions these are those outside of blocks; blocks, which must stay as they are, are
compared by a sum of their bits.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch

from keyhole.machine.captures import capturing
from keyhole.methods.step_numbers import StepNumbers
from keyhole.methods.zo import passes
from keyhole.methods.zo.looks import Looks
from keyhole.methods.zo.perturbed import PerturbedWeights
from keyhole.methods.zo.update import Pending
from keyhole.model.batch import DeviceBatch
from keyhole.model.forward.branches import Branches
from keyhole.model.forward.graphs import SMALL_FLOP_WITH_FACTORS
from keyhole.model.forward.masks import is_plain, left_out, noted
from keyhole.model.forward.memory import activation_bytes, launched_as_graphs
from keyhole.model.forward.users_hooks import UsersHooks
from keyhole.model.spare_memory import SpareMemory
from keyhole.model.structure.layout import Layout

SIGHTS = 3  # a shape is captured in its third step: libraries choose kernels in the first ones
MAX_RECORDINGS = 32
SHARE = 1 / 16  # of the free memory, for copies of a unit
ROOM = 4  # free memory that a capture requires, in multiples of the weights that a step changes


class Recording:
    """A CUDA graph, its static batches, and the losses that it writes."""

    def __init__(self, looks: Looks) -> None:
        found: dict[int, DeviceBatch] = {}
        for batch in looks.passes:
            if id(batch) not in found:
                found[id(batch)] = with_tensors(batch, torch.clone)
        self.places = [tensors_of(batch) for batch in found.values()]
        batches = [[found[id(batch)] for batch in one] for one in looks.batches]
        self.looks = replace(looks, batches=batches)
        self.graph: Any = None
        self.nll: list[torch.Tensor] = []
        self.counted: set[int] = set()  # units whose changed weights the graph counts

    def take(self, looks: Looks) -> None:
        """Copies the batches of another step into the static tensors."""
        distinct = {id(batch): batch for batch in looks.passes}
        for places, batch in zip(self.places, distinct.values(), strict=True):
            for place, tensor in zip(places, tensors_of(batch), strict=True):
                place.copy_(tensor)


class RecordedSteps:
    """Runs the passes of a method's steps, as CUDA graphs if possible. deferred_update: every step leaves its update to
    the next."""

    def __init__(self, perturbed: PerturbedWeights, deferred_update: bool) -> None:
        self.perturbed, self.update, model = perturbed, perturbed.update, perturbed.model
        self.possible = model.graphs is not None and not (model.engine.streamed or model.sharded)
        self.possible = self.possible and deferred_update and not model.classifies and model.ranks.size == 1
        self.possible = self.possible and model.formats.codec is None
        self.spare = SpareMemory(model.placed, model.device)
        self.recordings: dict[Hashable, Recording | None] = {}  # None: runs eagerly
        self.seen: Counter[Hashable] = Counter()
        self.hooks = UsersHooks(model.module.modules())
        self.replays, self.why = 0, ""  # why: the reason of the last capture that failed
        self.before, self.now = StepNumbers(model.device), StepNumbers(model.device)
        self.coef: torch.Tensor | None = None
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.branches = Branches()
        self.more: list[tuple[torch.Tensor, torch.Tensor]] = []  # copies of a unit for the pairs after the first
        self.rooms_version: int | None = None  # of the kept factors that the recordings read

    def run(self, looks: Looks) -> list[torch.Tensor]:
        """The losses of all passes; applies the pending update. Read them before the next step."""
        self._drop_outdated()
        key = self._key(looks) if self._is_usual(looks) else None
        if key is None or not self._is_due(key):
            return passes.run(self.perturbed, looks)
        if key not in self.recordings:
            return self._record(key, looks)
        recording = self.recordings[key]
        if recording is None:
            return passes.run(self.perturbed, looks)
        recording.take(looks)
        self._set_numbers()
        recording.graph.replay()
        self.replays += 1
        update = self.update
        update.at_home, update.counted = [1] * len(update.at_home), set(recording.counted)
        return recording.nll

    # -- which steps -----------------------------------------------------------------------------------------------

    def _is_usual(self, looks: Looks) -> bool:
        """Whether every unit lacks exactly the last update, and no checkpoint, gate or timeline observes the step."""
        if not self.possible or self.hooks.any():
            return False
        engine, update = self.perturbed.model.engine, self.update
        watched = engine.watch is not None or engine.gate is not None or engine.timeline.enabled
        if (factors := self.perturbed.factors) is not None and not factors.is_steady:
            return False
        usual = len(update.waiting) == 1 and not any(update.at_home) and not update.counted
        tokens = max((batch.inputs["input_ids"].numel() for batch in looks.passes), default=0)
        small = is_short(self.perturbed.model.layout, tokens, len(looks.batches), factors is not None)
        return usual and not watched and 0 < tokens and small

    def _key(self, looks: Looks) -> Hashable:
        """Equal for steps that one graph can serve."""
        number = {id(batch): i for i, batch in enumerate(looks.passes)}
        addresses = tuple(home.data_ptr() for home in self.perturbed.model.engine.homes)
        settings = (self.perturbed.eps, *self.update.decay.items(), *self.update.noise.items())
        shapes = tuple((number[id(batch)], signature_of(batch)) for batch in looks.passes)
        return tuple(looks.pairs), tuple(map(len, looks.batches)), shapes, addresses, settings

    def _drop_outdated(self) -> None:
        """Frees the recordings that read kept factors from memory that is used no more."""
        factors = self.perturbed.factors
        if factors is None or factors.kept.version == self.rooms_version:
            return
        self.rooms_version = factors.kept.version
        if self.stream is not None:  # the last replay may be running
            torch.cuda.synchronize(self.perturbed.model.device)
        self.recordings.clear()
        self.seen.clear()
        self.spare.held.pop("graphs", None)

    def _is_due(self, key: Hashable) -> bool:
        self.seen[key] += 1
        full = key not in self.recordings and len(self.recordings) >= MAX_RECORDINGS
        return self.seen[key] >= SIGHTS and not full

    # -- capture ---------------------------------------------------------------------------------------------------

    def _record(self, key: Hashable, looks: Looks) -> list[torch.Tensor]:
        """Runs a step eagerly, and captures it; keeps the graph if it gives the same bits."""
        update, (homes, still) = self.update, self._divided()
        self.recordings[key] = None
        if not self._has_room(homes, looks):
            self.why = "there is not enough free memory"
            return passes.run(self.perturbed, looks)
        self._set_numbers()
        assert self.coef is not None  # _set_numbers has made it
        before, changed_before, pending = [home.clone() for home in homes], update.changed.clone(), update.waiting[-1]
        sums = list(map(sum_of_bits, still))
        blocks = self.perturbed.model.blocks if is_plain(looks.passes) else []
        with noted(blocks) as without_mask:
            expected = passes.run(self.perturbed, looks)
        after, changed = [home.clone() for home in homes], update.changed.clone()
        books = update.at_home, update.counted
        recording = Recording(looks)
        try:
            restore(homes, before)
            update.changed.copy_(changed_before)
            update.at_home, update.counted = [0] * len(books[0]), set()
            update.waiting[-1] = Pending(self.coef, self.before.step)
            with left_out(blocks, without_mask):
                self._capture(recording)
            recording.counted = update.counted
            if recording.graph is not None:
                recording.graph.replay()
                made, wanted = [*recording.nll, *homes, update.changed], [*expected, *after, changed]
                if not all(map(torch.equal, map(sum_of_bits, still), sums)):
                    raise RuntimeError("a recorded step of zo.rank changed weights of blocks; go on with graphs=False")
                if all(map(torch.equal, made, wanted)):
                    self.recordings[key] = recording
                else:
                    self.why = "a recording gave other bits"
        finally:
            restore(homes, after)
            update.changed.copy_(changed)
            update.at_home, update.counted = books
            update.waiting[-1] = pending
        return expected

    def _capture(self, recording: Recording) -> None:
        """Enqueues the step on a capturing stream; nothing is computed."""
        perturbed, model = self.perturbed, self.perturbed.model
        graph = torch.cuda.CUDAGraph()
        if self.stream is None:  # one for all, because cuBLAS keeps a workspace per stream
            self.stream = torch.cuda.Stream(model.device)
            self._branch(len(recording.looks.visits))
        if not any(self.recordings.values()):  # a pool is freed with its last graph
            self.pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(model.device)
        try:
            self.branches.forked.clear()
            with (
                self.spare.holding("graphs"),
                torch.cuda.stream(self.stream),
                perturbed.captured(self.now.step, self.branches, self.more),
                capturing(graph, self.pool, self.stream),
            ):
                recording.nll = passes.run(perturbed, recording.looks, steady=False)
            recording.graph = graph
        except Exception as error:  # any operation of the model that cannot be captured
            self.why = str(error).partition("\n")[0]
            self.pool = torch.cuda.graph_pool_handle()  # the old one may be refused (machine/captures.py)
        torch.cuda.synchronize(model.device)
        model.engine.compute = torch.cuda.current_stream(model.device)

    def _branch(self, pairs: int) -> None:
        """Makes streams and copies for this number of pairs, or for one pair."""
        perturbed, free_bytes = self.perturbed, self.spare.left()
        if 2 * (pairs - 1) * perturbed.plus.nbytes > SHARE * free_bytes or perturbed.factors is not None:
            pairs = 1
        self.branches = Branches(perturbed.model.device, pairs)
        self.more = [(torch.empty_like(perturbed.plus), torch.empty_like(perturbed.minus)) for _ in range(pairs - 1)]
        self.spare.held["copies"] = 2 * (pairs - 1) * perturbed.plus.nbytes

    def _set_numbers(self) -> None:
        """Writes the pending update and the step numbers to the device."""
        pending = self.update.waiting[-1]
        if self.coef is None:
            self.coef = torch.empty_like(pending.coef)
        self.coef.copy_(pending.coef)
        self.before.set(0.0, pending.step)
        self.now.set(0.0, cast(int, self.perturbed.step))  # on the device within `captured` only

    def _divided(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The homes that a step changes, and those that it leaves as they are."""
        model, low_rank = self.perturbed.model, self.perturbed.factors is not None
        blocks = {unit.index for unit in model.layout.of_kind("block")} if low_rank else set()
        homes = list(enumerate(model.engine.homes))
        return [home for i, home in homes if i not in blocks], [home for i, home in homes if i in blocks]

    def _has_room(self, homes: list[torch.Tensor], looks: Looks) -> bool:
        """homes: those that a step changes."""
        model = self.perturbed.model
        tokens = max(batch.inputs["input_ids"].numel() for batch in looks.passes)
        count = len(looks.batches) if self.perturbed.factors is not None else 1  # of looks that pass a block together
        moving = activation_bytes(model.layout, tokens * count, len(looks.passes) // count, model.dtype.itemsize)
        return self.spare.has(ROOM * sum(home.nbytes for home in homes) + 2 * moving)


def is_short(layout: Layout, tokens: int, looks: int, low_rank: bool) -> bool:
    """Whether the host would be the bottleneck of a pass over so many tokens. With low-rank directions a pass carries
    all looks, by more and smaller kernels."""
    at_once = low_rank and launched_as_graphs(layout, tokens * looks, SMALL_FLOP_WITH_FACTORS)
    return at_once or launched_as_graphs(layout, tokens)


def sum_of_bits(flat: torch.Tensor) -> torch.Tensor:
    """A number that is the same for the same bits, in whatever order they are added."""
    return flat.view(torch.uint8).sum(dtype=torch.int64)


def restore(homes: list[torch.Tensor], kept: list[torch.Tensor]) -> None:
    """Restores the weights."""
    for home, old in zip(homes, kept, strict=True):
        home.copy_(old)


def with_tensors(value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same batch with other tensors."""
    if isinstance(value, torch.Tensor):
        return make(value)
    if isinstance(value, dict):
        return {name: with_tensors(part, make) for name, part in value.items()}
    if is_dataclass(value):
        parts = {field.name: with_tensors(getattr(value, field.name), make) for field in fields(value)}
        return replace(cast(Any, value), **parts)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    with_tensors(value, note)
    return found


def signature_of(value: Any) -> Hashable:
    """Equal for batches that differ only in the contents of their tensors."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((name, signature_of(part)) for name, part in value.items())
    if is_dataclass(value):
        return tuple((field.name, signature_of(getattr(value, field.name))) for field in fields(value))
    return value
