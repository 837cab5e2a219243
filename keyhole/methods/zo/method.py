"""Zeroth-order fine-tuning: forward passes only, every unit visited once per step.

For directions z_1..z_q, drawn anew every step t, and the loss L over all micro-batches of the step, an estimator
(estimators/) turns losses near w into coefficients c_1..c_q; MeZO's, the default, is c_i = g_i / q:

    g_i = (L(w + eps z_i) - L(w - eps z_i)) / (2 eps)        w <- w - lr (sum_i c_i z_i + weight_decay w)

Differences from the textbook loop (perturb in place by +1, -2, +1, then update: four passes over w):

  - All passes of a step run in one sweep (passes.py), in which each unit is read once, updated and perturbed
    (perturbed.py).
  - The update of a step needs c, which is known only at its end; so it is applied when the unit is visited at t + 1
    (update.py). Over the link: each unit once H2D, and at most once D2H per step (write_back.py).
  - z is a function of (seed, t, i, element), never stored. Perturbed weights are computed from the unperturbed ones, so
    rounding errors do not accumulate.
  - c stays on the device. A non-finite loss gives an update of exactly zero.

Memory beside the weights: two copies of the largest unit, two of the spine per pair of looks, both in the dtype of
compute, and the hidden states of the passes.
Legend: q directions, m micro-batches; a look is a perturbed point (estimators/base.py); passes are numbered by look.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.base import Method, Skeleton
from keyhole.methods.dropout import dropout_rates
from keyhole.methods.weight_decay import weight_decay_of
from keyhole.methods.zo import passes
from keyhole.methods.zo.arguments import Decay, Noise
from keyhole.methods.zo.closure import Closure, losses_at_looks
from keyhole.methods.zo.defaults import DEFAULTS
from keyhole.methods.zo.estimators import ESTIMATORS
from keyhole.methods.zo.estimators.base import Estimate, Estimator
from keyhole.methods.zo.looks import Looks, look_at_all, look_at_parts, warn_of_unused
from keyhole.methods.zo.low_rank import merge as factor_merge
from keyhole.methods.zo.low_rank import state as factor_state
from keyhole.methods.zo.low_rank.factors import Factors
from keyhole.methods.zo.low_rank.guide import Guide
from keyhole.methods.zo.low_rank.kept import check_folds
from keyhole.methods.zo.low_rank.layers import FactoredLayers
from keyhole.methods.zo.low_rank.parts import find_parts
from keyhole.methods.zo.perturbed import PerturbedWeights
from keyhole.methods.zo.rate_search import RateSearch
from keyhole.methods.zo.recorded_step import RecordedSteps
from keyhole.methods.zo.rounded_run import refusal
from keyhole.methods.zo.traits import ZO as ROW
from keyhole.methods.zo.traits import ZOConfig
from keyhole.methods.zo.update import Pending, Update
from keyhole.model.batch import Batch
from keyhole.model.forward.compile import compile_forward
from keyhole.model.objective import loss_sum
from keyhole.model.structure.layout import Unit
from keyhole.ranks import Ranks


class ZO(Method):
    """An estimator with fused, deferred updates. `lr` may be changed between steps; with lr="auto" the first steps
    search a rate, and `lr` is a factor on it. Settings that are None, and lr=None: the estimator's defaults
    (defaults.py)."""

    row = ROW
    settings: ZOConfig
    may_freeze = False  # spans of trained weights are cut once

    def _setup(self) -> None:
        model, own, low_rank = self.model, self.settings, self.settings.rank is not None
        eps, directions = own.eps, own.directions
        assert eps is not None and directions is not None and own.distribution is not None  # filled in
        if own.compile:
            compile_forward(model, own.compile if isinstance(own.compile, str) else "inductor")
        self.estimator = ESTIMATORS[own.estimator](directions, eps, own.clip, own.beta)
        self.search = RateSearch(self.estimator, own.rank) if self.searches else None
        self.noise: Noise = {"seed": own.seed, "distribution": own.distribution}
        self.decay: Decay = {"weight_decay": own.weight_decay, "rounding": own.rounding}
        self.step_count = 0
        self._has_split = False
        spared = weight_decay_of(model.module, own).spared
        self.keeps_base = self.light
        blocks = frozenset(unit.index for unit in model.layout.of_kind("block")) if low_rank else frozenset()
        every = own.write_back_every if own.deferred_update else 1
        self.update = Update(model, self.noise, self.decay, spared, every, blocks)
        model.methods.attach(self)
        self.latest: Pending | None = None  # the update of the last step, applied or not: for the journal
        self.projected: torch.Tensor | None = None
        model.binding.forget()
        rules: list[Estimator | RateSearch] = [self.estimator] if self.search is None else [self.estimator, self.search]
        pairs = max(len(rule.pairs) for rule in rules)
        self.memory = torch.zeros(sum(rule.remembers for rule in rules), device=model.device)
        self.perturbed = PerturbedWeights(model, self.update, eps, pairs, block_at_once=bool(own.compile))
        self.factors: Factors | None = None
        self.guide: Guide | None = None  # finds the directions of each period; None: they are random
        if low_rank:
            names = ("rank", "refresh", "fold", "rounding", "merge", "fold_periods", "fold_error")
            how = {name: vars(own)[name] for name in names}
            self.factors = Factors(model, self.noise, **how, guided=own.guide is not None, pairs=pairs)
            self.guide = None if own.guide is None else Guide(self.factors, own.guide)
            self.perturbed.layers = FactoredLayers(model, self.factors, self.guide)
            self.update.flush_elsewhere = partial(factor_merge.bring_home, self.factors)
        self.recorded = RecordedSteps(self.perturbed, own.deferred_update)

    @classmethod
    def check_shapes(cls, base: Skeleton, own: Any) -> None:
        if own.rank is not None:
            parts = find_parts(base, own.rank)
            check_folds(parts, None if own.fold else own.fold_periods)

    # -- one step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _step(self, batch: Batch | Sequence[Batch] | Closure) -> torch.Tensor:
        """One step on one batch or its micro-batches, or on the losses that a closure returns (closure.py). Returns the
        mean loss of the perturbed passes, on the device."""
        self.perturbed.step = self.step_count
        if callable(batch) and not isinstance(batch, Mapping):
            return self._step_by_closure(batch)
        search = self.search if self.search is not None and self.search.found is None else None
        batches = self.model.checked(batch)
        looks = self._look(batches, search)
        self.model.apply_deferred(before_step_of=self)
        if self.guide is not None:
            self.guide.renew(self.update, batches)
        if self.step_count == self.settings.fp8_steps and self.model.formats.codec is not None and not self.light:
            warnings.warn(
                f"wire: {refusal(self.step_count + 1, self.settings.fp8_steps)}", stacklevel=2
            )  # in a user's own loop
        self.update.begin()
        if search is not None:
            with nullcontext() if self.factors is None else self.factors.another_v(self.step_count):
                nll = passes.run(self.perturbed, looks)
        else:
            nll = self.recorded.run(looks)
        loss = self._estimate(nll, looks) if search is None else self._search(search, nll, looks)
        if not self.settings.deferred_update:
            self._flush()
        return loss

    def _step_by_closure(self, closure: Closure) -> torch.Tensor:
        """One step; returns its loss, as the estimator computes it."""
        if self.estimator.splits or self.search is not None:
            why = "a search for a rate" if self.search is not None else f"estimator {self.estimator.name}"
            raise UserError(f"closure: {why} needs the rows of a batch; use estimator=mezo or fzoo, and give a rate")
        self.model.apply_deferred()
        if self.guide is not None:
            self.guide.renew(self.update, [])
        losses = losses_at_looks(closure, self.perturbed, self.estimator.pairs)
        found = self.estimator.estimate(losses, self.memory)
        self.defer(found, losses, found.memory, self.rate)
        if not self.settings.deferred_update:
            self._flush()
        return self.estimator.loss(losses)

    def _look(self, batches: list[Batch], search: RateSearch | None) -> Looks:
        """The looks of this step: each on all rows, or each pair on its part of them."""
        if search is not None:  # a few steps, which every rank makes alone: they need the losses of single rows
            return look_at_all(self.model, search.pairs, search.halves(batches), Ranks())
        if self.estimator.splits:
            if not self._has_split:  # later steps are as large, but for the last one of an epoch
                warn_of_unused(self.settings.count, batches)
            self._has_split = True
            return look_at_parts(self.model, self.estimator, batches, self.model.ranks)
        return look_at_all(self.model, self.estimator.pairs, batches, self.model.ranks)

    def _estimate(self, nll: list[torch.Tensor], looks: Looks) -> torch.Tensor:
        """Computes the pending update from the losses of the passes; returns the loss of the step."""
        parts = [loss_sum(x, batch.candidates) for x, batch in zip(nll, looks.passes, strict=True)]
        own, counts = torch.stack(parts) if parts else torch.zeros(0, device=self.model.device), looks.counts
        sums = self.model.ranks.in_order(own, counts)
        if len(set(counts)) == 1:
            by_look = sums.view(len(counts), -1).sum(dim=1)
        else:
            by_look = torch.stack([part.sum() for part in sums.split(counts)])
        losses, kept = by_look / max(1, looks.loss_count), self.estimator.remembers
        found = self.estimator.estimate(losses, self.memory[:kept])
        self.defer(found, losses, torch.cat([found.memory, self.memory[kept:]]), self.rate)
        return self.estimator.loss(losses)

    def _search(self, search: RateSearch, nll: list[torch.Tensor], looks: Looks) -> torch.Tensor:
        """A step of the rate search: no weight changes."""
        kept, nothing = self.estimator.remembers, self.memory.new_zeros(self.settings.count)
        losses, tally = search.measure(nll, looks.batches[0], self.memory[kept:])
        slope = (losses[:1] - losses[1:2]) / (2 * self.perturbed.eps)
        self.defer(Estimate(slope, nothing, self.memory), losses, torch.cat([self.memory[:kept], tally]), 0.0)
        search.note(self.memory[kept:])
        return losses.mean()

    def defer(self, found: Estimate, losses: torch.Tensor, memory: torch.Tensor, rate: float) -> None:
        """Makes the update pending, on the device. Non-finite losses give no update, and do not change the memory."""
        lr = torch.full((1,), rate, device=losses.device)
        coef, finite = torch.cat([lr, found.coefficients]), torch.isfinite(losses).all()
        coef = torch.where(finite, coef, torch.zeros_like(coef))
        self.memory = torch.where(finite, memory, self.memory)
        self.projected = found.projected
        self.latest = self.update.defer(Pending(coef, self.step_count))
        if self.factors is not None:
            self.factors.update(self.latest)
            if self.model.engine.shared:  # all ranks together, while none uploads
                factor_merge.bring_home(self.factors)
        self.step_count += 1

    @property
    def rows_ahead(self) -> tuple[int, int] | None:
        return (self.guide.rows, self.guide.tokens) if self.guide is not None and self.guide.is_due else None

    def look_ahead(self, batches: Sequence[Batch]) -> None:
        if self.guide is None:
            raise UserError("look_ahead: directions are random, and nothing is found from rows; make ZO with guide=N")
        self.guide.ahead = self.model.checked(batches, of_step=False)

    # -- between steps ---------------------------------------------------------------------------------------------

    @property
    def rate(self) -> float:
        """The current learning rate: `lr`, or `lr` times the rate that was found (0 during the search)."""
        return self.lr if self.search is None else self.lr * (self.search.found or 0.0)

    @property
    def pending(self) -> Pending | None:
        """The update that the weights at home lack. Saving, evaluating and generating apply it."""
        return self.update.pending

    @property
    def changed(self) -> torch.Tensor:
        """The number of weights that the last update changed."""
        return self.update.changed

    @property
    def deferred(self) -> Callable[[], None]:
        """The flush of the update, which outlives the method."""
        return self.update.flush

    @property
    def is_settled(self) -> bool:
        """Whether no update waits for the next visit of the weights."""
        return self.pending is None

    def owes(self, unit: Unit) -> bool:
        """Whether the unit's home lacks an update."""
        if self.factors is not None and unit.index in self.factors.units:
            return self.factors.is_behind(unit)
        return bool(self.update.owed(unit))

    def describe(self) -> list[str]:
        """Lines for the start block: the decisions made."""
        drops = dropout_rates(self.model.module)
        off = ["dropout of the model: off, since zo compares losses of the same function"] if drops else []
        search = [] if self.search is None else self.search.describe()
        low_rank = self.perturbed.layers
        blocks = self.update.write_back.describe() if low_rank is None else low_rank.describe()
        return [self._rule(), *blocks, *off, *search]

    def _rule(self) -> str:
        """The estimator with its settings, which may be its own defaults."""
        usual, q = DEFAULTS[self.estimator.name], self.settings.count
        passes = f"{usual.passes(q)} forward passes per step" + (", of a part of its rows each" if usual.splits else "")
        drawn = f"{q} direction{'s' * (q > 1)} ({self.noise['distribution']})"
        return f"estimator: {self.estimator.name}, {drawn}, eps {self.settings.eps:g}: {passes}"

    def news(self) -> list[str]:
        """The rate, when it was just found, folds of kept periods, and layers without directions of their own."""
        folds = [] if self.factors is None else self.factors.kept.news()
        folds += [] if self.guide is None else self.guide.news()
        return folds + ([] if self.search is None else self.search.news())

    def _flush(self) -> None:
        """Applies the deferred update, so that the weights at home are those after the last step (for matrices with
        factors: after the last period)."""
        self.update.flush()

    def replay(self, updates: list[tuple[Pending, float]]) -> Iterator[Unit]:
        """Applies known updates, each with its weight decay, and yields every unit after its last update."""
        if self.factors is None:
            return self.update.replay(updates)
        return factor_state.replay(self.factors, self.guide, self.update, updates)

    def metrics(self) -> dict[str, torch.Tensor | float]:
        """Scalars of the last step, on the device. `changed`: share of the weights that the update before it
        changed."""
        if self.projected is None:
            return {}
        changed, total = self.changed, self.update.trained_numel
        kept: dict[str, float] = {}
        if self.factors is not None:
            kept = self.factors.kept.metrics() if self.light else {}
            changed, total = changed + self.factors.changed, total + self.factors.parts.numel
        return {"projected_grad": self.projected.abs().mean(), "changed": changed / total, **kept}

    def _state(self) -> dict[str, Any]:
        """The noise needs no state besides the step count. Flush first."""
        self.flush()
        return self._counts() | {"changed": int(self.changed)}

    def _deferred_state(self) -> dict[str, Any] | None:
        """The state without a flush, while an update waits for the next visit of the weights."""
        return None if self.pending is None or self.light else self._counts()

    def _counts(self) -> dict[str, Any]:
        counts: dict[str, Any] = {"step_count": self.step_count, "seed": self.noise["seed"]}
        counts |= {"memory": self.memory.tolist()} if self.memory.numel() else {}
        return counts if self.factors is None else counts | factor_state.to_state(self.factors)

    def learned_beside(self, state: Mapping[str, Any]) -> FactoredLayers | None:
        """The factors of a checkpoint, if its weights lack them."""
        layers = self.perturbed.layers
        saved = None if layers is None else factor_state.saved(layers.factors, state)
        return None if layers is None or saved is None else layers.with_factors(saved)

    def journal_update(self) -> torch.Tensor | None:
        """[lr, c_1 .. c_q] of the last step, applied or not, and the estimator's memory after it."""
        return None if self.latest is None else torch.cat([self.latest.coef, self.memory])

    def remember(self, numbers: Sequence[float]) -> None:
        """Sets the estimator's memory, from a checkpoint or a journal record."""
        kept = self.estimator.remembers
        if self.search is not None and len(numbers) != self.memory.numel():
            raise UserError(
                "learning_rate: auto finds a rate in the first steps of a run, and this run began with a number; set "
                "learning_rate to one"
            )
        if len(numbers) < kept:
            raise UserError(f"zo: the checkpoint lacks the {kept} numbers that {self.estimator.name} remembers")
        self.memory = torch.tensor(list(numbers[: self.memory.numel()]), dtype=torch.float32, device=self.model.device)
        if self.search is not None:
            self.search.read(self.memory[kept:])

    def _load(self, state: Mapping[str, Any]) -> None:
        if state["seed"] != self.noise["seed"]:
            raise UserError(f"seed: the checkpoint was made with {state['seed']}, this run has {self.noise['seed']}")
        if self.factors is None and "factors" in state:
            raise UserError(
                "zo.rank: the state has learned low-rank factors, which would be lost; zo.rank must be as it was"
            )
        if self.factors is not None:
            factor_state.check_guide(self.factors, state, guided=self.guide is not None)
        self.step_count = int(state["step_count"])
        if self.factors is not None:
            factor_state.from_state(self.factors, state, self.step_count)
        self.changed.fill_(state.get("changed", 0))
        self.remember(state.get("memory", ()))
