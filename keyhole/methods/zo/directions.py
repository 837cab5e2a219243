"""Directions of full size, and the sweep of a step: every unit is updated and perturbed as it arrives, and all passes
go through it.

The textbook loop perturbs in place by +1, -2, +1, then updates: four passes over w, 16 bytes per element in 16 bit.
Here all passes of a step, over all looks and micro-batches, run in lockstep (model/forward/lockstep.py). At each unit

    one fused pass over w applies the update of step t - 1 and writes w + eps z and w - eps z: 2 bytes read, 6 written
    for each further pair of looks, one pass over w writes its two copies
    the passes of each look run through its copy

The copies of a unit lie in memory that the next unit reuses; those of the common unit live through the step, since
every block needs them (`commons`, two per pair). The chunks of the head are visited in the same way after the last
block. Of the input embedding only the rows that the batch needs are perturbed: the pending update is applied to these
rows on the fly, with the same bits as the full update of the table at the end of the sweep.

`Dense` is also what a step asks of any directions; those of low rank (low_rank/directions.py) have other blocks.

Bytes: two copies of the largest unit that is perturbed as a whole, and two of the common unit per pair of looks, in the
dtype of compute. Legend: M tokens looked up, N trained tokens, H width.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.machine.held import not_alone
from keyhole.methods.base import Saved, State
from keyhole.methods.zo.estimators import Looks, Pair
from keyhole.methods.zo.low_rank.factors import Factors
from keyhole.methods.zo.low_rank.guide import Guide
from keyhole.methods.zo.traits import ZOConfig
from keyhole.methods.zo.update import Pending, Update
from keyhole.model.batch import Batch
from keyhole.model.forward.captured import Branches
from keyhole.model.model import Model
from keyhole.model.structure.layout import Unit
from keyhole.ops.arguments import Count
from keyhole.ops.loss import RunningNLL

Closure = Callable[[], Any]
Side = tuple[range, torch.Tensor | None, torch.Tensor]
"""(passes of a look, perturbed weights of a unit, perturbed common)."""


class Dense:
    """z for every weight. pairs: the most pairs of looks of a step."""

    factors: Factors | None = None  # those of low rank have some
    guide: Guide | None = None
    looks_at_once = False  # a pass carries the rows of all looks
    untouched: frozenset[int] = frozenset()  # units that a step leaves as they are

    def __init__(self, model: Model, update: Update, own: ZOConfig, pairs: int) -> None:
        self.model: Model = weakref.proxy(model)  # which holds this object
        self.update, self.eps, self.block_at_once = update, cast(float, own.eps), bool(own.compile)
        layout, dtype, device = model.layout, model.dtype, model.device
        largest = max((u.numel for u in layout.units[1:] if u.index not in update.elsewhere), default=0)
        self.copies = [torch.empty(largest, dtype=dtype, device=device) for _ in range(2)]
        self.commons = torch.empty((pairs, 2, layout.common.numel), dtype=dtype, device=device)
        self.step: Count = 0  # whose directions are used; within `captured` a number on the device
        self.branches = Branches()  # streams for looks, within `captured`

    def perturbation(self, pair: Pair) -> ops.ZOStep:
        """The step, eps and direction of a pair, as settings of ops."""
        eps = self.eps * pair.scale
        return replace(self.update.noise, step=self.step, eps=eps, direction=pair.direction, beside=pair.beside)

    # -- a sweep ---------------------------------------------------------------------------------------------------

    def run(self, looks: Looks, steady: bool = True) -> list[torch.Tensor]:
        """Visits every unit once: updates and perturbs it, and runs all passes through it. Returns their losses, of the
        trained tokens, or of the rows of a classifier. steady: blocks may run as graphs of their own (Model.lockstep);
        False while the whole step is captured."""
        model = self.model
        with model.sweep("train"):
            common = model.layout.common
            w = model.engine.acquire(common.index)
            for p, pair, _ in looks.visits:
                self.update.perturb(common, w, self.commons[p].unbind(), self.perturbation(pair), arrived=p == 0)
            hidden = self.hidden(looks, steady)
            if model.classifies:
                nll = [model.head.nll(x, batch.target_N) for x, batch in zip(hidden, looks.passes, strict=True)]
            else:
                nll = self._visit_head(hidden, looks)
            model.binding.bind_homes()
            self.update.apply_to_rest()
        return nll

    def hidden(self, looks: Looks, steady: bool) -> list[torch.Tensor]:
        """The hidden states of all passes, after all blocks."""
        branches = self.branches
        sides = {i: (pair, side) for _, pair, by_look in looks.visits for side, at in enumerate(by_look) for i in at}

        def rows(index: int, ids_M: torch.Tensor) -> torch.Tensor:
            pair, side = sides[index]
            return self.rows(self.model.table_rows(ids_M), ids_M, pair)[side]

        def serve(unit: Unit | None, resume: Callable[[int], None]) -> None:
            for arrived in self._arrive(unit, looks):
                for side, (passes, weights, common) in enumerate(arrived):
                    self.model.binding.bind(unit, weights, common)
                    branches.fork(side)
                    for index in passes:
                        resume(index)
                branches.join()

        streams = branches.of_passes([by_look for _, _, by_look in looks.visits])
        return self.model.lockstep(looks.passes, serve, rows, steady, self.block_at_once, streams)

    def _arrive(self, unit: Unit | None, looks: Looks) -> Iterator[Iterable[Side]]:
        """Yields the sides of each pair; releases the unit's slot as early as possible."""
        engine = self.model.engine
        w = None if unit is None or not looks.visits else engine.acquire(unit.index)
        for p, pair, by_look in looks.visits:
            weights: Sequence[torch.Tensor | None] = (None, None)
            if unit is not None and w is not None:
                weights = copies = [copy[: unit.numel] for copy in self.copies]
                self.update.perturb(unit, w, copies, self.perturbation(pair), arrived=p == 0)
                if p == len(looks.visits) - 1:
                    engine.release(unit.index)
            yield zip(by_look, weights, self.commons[p].unbind(), strict=False)  # a pair may have one look

    def rows(self, stale_MH: torch.Tensor, ids_M: torch.Tensor, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the table at both looks of a pair, from the rows at home, which get the pending update."""
        table, update, how = self.model.layout.table, self.update, self.perturbation(pair)
        if not table.param.requires_grad:
            same_MH = stale_MH.to(self.model.dtype)
            return same_MH, same_MH
        if update.pending is not None:
            how = update.pending.added_to(how, decays=id(table.param) not in update.spared)
        return ops.zo_rows(stale_MH, ids_M, replace(how, offset=table.start), self.model.dtype)

    def _visit_head(self, hidden: list[torch.Tensor], looks: Looks) -> list[torch.Tensor]:
        """The nll of every trained token, per pass: each chunk of the head is visited once, for all passes."""
        running = [RunningNLL(batch.target_N) for batch in looks.passes]
        for unit in self.model.layout.head_units:
            for sides in self._arrive(unit, looks):
                for passes, weights, common in sides:
                    self.model.binding.bind_head(unit, cast(torch.Tensor, weights), common)  # None without a unit
                    for index in passes:
                        self.model.head.add_nll(running[index], hidden[index], unit.span[0])
        return [state.nll_N() for state in running]

    @contextmanager
    def captured(self, step: Count, branches: Branches) -> Iterator[None]:
        """A context in which directions are those of a step whose number is on the device, and looks have streams."""
        before, self.step, self.branches = self.step, step, branches
        try:
            yield
        finally:
            self.step, self.branches = before, Branches()

    # -- one look, for closures ------------------------------------------------------------------------------------

    @contextmanager
    def at_look(self, number: int, pair: Pair, side: int) -> Iterator["AtLook"]:
        """A context in which the model is seen at one look. number: of the pair; side: of the look within the pair."""
        replacement = AtLook(self, number, pair, side)
        with self.model.device_weights.replaced_by(replacement):
            yield replacement

    def weights_at(self, unit: Unit, stored: torch.Tensor, number: int, pair: Pair) -> Sequence[torch.Tensor]:
        """The unit's weights at both looks of a pair, in memory that the next one reuses (the common one does
        not)."""
        copies: Sequence[torch.Tensor] = self.commons[number].unbind()
        if unit.kind != "common":
            copies = [copy[: unit.numel] for copy in self.copies]
        self.update.perturb(unit, stored, copies, self.perturbation(pair), arrived=False)
        return copies

    # -- what directions have beside the weights: nothing -----------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the memory beside the weights that passes read; another one: it lies elsewhere."""
        return 0

    def prepare(self, batches: list[Batch]) -> None:
        """Before a step."""

    def updated(self, pending: Pending) -> None:
        """After a step, whose update is known."""

    def owes(self, unit: Unit) -> bool:
        """Whether the unit's home lacks an update."""
        return bool(self.update.deferred(unit))

    def replay(self, updates: list[Pending]) -> None:
        """Applies known updates."""
        self.update.replay(updates)

    def describe(self) -> list[str]:
        return self.update.write_back.describe()

    @property
    def changed_share(self) -> torch.Tensor:
        """The share of the weights that the last applied update changed."""
        return self.update.changed / self.update.trained_numel

    def state(self) -> State:
        """For a checkpoint."""
        return {}

    def load(self, state: Saved, steps: int) -> None:
        if "factors" in state:
            raise UserError(
                "zo.rank: the state has learned low-rank factors, which would be lost; zo.rank must be as it was"
            )


# -- closures: a step for any loss that can be computed from the model, differentiable or not --------------------------
#
# Zeroth-order steps need losses, not gradients, so the loss may be an accuracy, an F1, or a reward of generated text.
# The closure is called once per look of the estimator, each time with the model *seen through* perturbed weights: units
# are perturbed as they arrive, streamed or resident, and the homes are not changed. Every evaluation in it is a sweep
# of its own: as many sweeps per step as looks, where a batch takes one, and one more before, for the update of the
# step before. The noise is that of a step on a batch; update, journal, checkpoints and replay are as of any other step.


class AtLook:
    """The weights of a model at one look, as a replacement (model/forward/binding.py)."""

    def __init__(self, directions: Dense, number: int, pair: Pair, side: int) -> None:
        self.directions, self.number, self.pair, self.side = directions, number, pair, side
        self.is_used = False  # every evaluation looks up rows of the table

    def weights(self, unit: Unit, stored: torch.Tensor) -> torch.Tensor:
        return self.directions.weights_at(unit, stored, self.number, self.pair)[self.side]

    def rows(self, stale_MH: torch.Tensor, ids_M: torch.Tensor) -> torch.Tensor:
        self.is_used = True
        return self.directions.rows(stale_MH, ids_M, self.pair)[self.side]


def losses_at_looks(closure: Closure, directions: Dense, pairs: list[Pair]) -> torch.Tensor:
    """The number that the closure returns at each look. No update may be pending."""
    losses = []
    for number, pair in enumerate(pairs):
        for side in range(pair.looks):
            with directions.at_look(number, pair, side) as replacement:
                with not_alone():  # it may wait for a thread that computes with another model
                    found = closure()
                losses.append(_number(found, directions.model.device))
            if not replacement.is_used and torch.isfinite(losses[-1]):  # else there is no update
                raise UserError(
                    "closure: it has evaluated nothing at the perturbed weights, and its number says nothing of them; "
                    "compute it from model.nll(batch), model.logits(batch) or model.generate(ids), in every call"
                )
    return torch.stack(losses)


def _number(found: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    try:
        value = torch.as_tensor(found, dtype=torch.float32, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"closure: found a {type(found).__name__}, expected a number: the loss") from error
    if value.numel() != 1:
        raise UserError(f"closure: found a tensor of shape {tuple(value.shape)}, expected one number: the loss")
    return value.reshape(())
