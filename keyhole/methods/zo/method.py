"""Zeroth-order fine-tuning: forward passes only, every unit visited once per step.

For directions z_1..z_q, drawn anew every step t, and the loss L over all micro-batches of the step, an estimator
(estimators.py) turns losses near w into coefficients c_1..c_q; MeZO's, the default, is c_i = g_i / q:

    g_i = (L(w + eps z_i) - L(w - eps z_i)) / (2 eps)        w <- w - lr (sum_i c_i z_i + weight_decay w)

A step (`_step`): share the micro-batches among ranks; apply what other methods have deferred; in one sweep
(directions.py) update and perturb every unit as it arrives, and run all passes through it; from their losses one
coefficient a direction; what they mean for the weights is known now, and applied at the next visit (to factors of low
rank at once). A closure takes a sweep or more per look.

Differences from the textbook loop (perturb in place by +1, -2, +1, then update: four passes over w):

  - All passes of a step run in one sweep, in which each unit is read once, updated and perturbed.
  - The update of a step needs c, which is known only at its end; so it is applied when the unit is visited at t + 1
    (update.py). Over the link: each unit once H2D, and at most once D2H per step (write_back.py).
  - z is a function of (seed, t, i, element), never stored. Perturbed weights are computed from the unperturbed ones, so
    rounding errors do not accumulate.
  - c stays on the device. A non-finite loss gives an update of exactly zero.

Memory beside the weights: two copies of the largest unit, two of the common unit per pair of looks, both in the dtype
of compute, and the hidden states of the passes.
Legend: q directions, m micro-batches; a look is a point, perturbed but for one of fzoo; passes are numbered by look.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.base import Method, Saved, Skeleton, State
from keyhole.methods.dropout import dropout_rates
from keyhole.methods.weight_decay import weight_decay_of
from keyhole.methods.zo.directions import Closure, Dense, losses_at_looks
from keyhole.methods.zo.estimators import ESTIMATORS, look_at
from keyhole.methods.zo.low_rank.directions import LowRank
from keyhole.methods.zo.low_rank.parts import find_parts
from keyhole.methods.zo.recorded_step import RecordedSteps
from keyhole.methods.zo.traits import ZO as ROW
from keyhole.methods.zo.traits import ZOConfig
from keyhole.methods.zo.update import Pending, Update
from keyhole.model.batch import Batch, split_all
from keyhole.model.forward.blocks import compile_forward
from keyhole.model.structure.layout import Unit


class ZO(Method):
    """An estimator with fused, deferred updates. `lr` may be changed between steps. Settings that are None, and
    lr=None: the estimator's defaults (traits.py)."""

    row = ROW
    settings: ZOConfig
    may_freeze = False  # spans of trained weights are cut once

    def _setup(self) -> None:
        model, own = self.model, self.settings
        assert own.eps is not None  # filled in
        if own.compile:
            compile_forward(model, own.compile if isinstance(own.compile, str) else "inductor")
        self.estimator = ESTIMATORS[own.estimator](own.count, own.eps, own.clip)
        self.step_count = 0
        self.keeps_base = self.light
        blocks = frozenset(unit.index for unit in model.layout.of_kind("block")) if own.rank else frozenset()
        self.update = Update(model, own, weight_decay_of(model.module, own).spared, blocks)
        model.methods.attach(self)
        self.latest: Pending | None = None  # the update of the last step, applied or not: for the journal
        self.projected: torch.Tensor | None = None
        model.binding.forget()
        kind = LowRank if own.rank else Dense
        self.directions: Dense = kind(model, self.update, own, len(self.estimator.pairs))
        self.factors, self.guide = self.directions.factors, self.directions.guide
        self.recorded = RecordedSteps(self.directions, own.deferred_update)

    @classmethod
    def check_shapes(cls, base: Skeleton, own: Any) -> None:
        if own.rank is not None:
            find_parts(base, own.rank)

    # -- one step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _step(self, batch: Batch | Sequence[Batch] | Closure) -> torch.Tensor:
        """One step on one batch or its micro-batches, or on the losses that a closure returns. Returns the mean loss of
        the perturbed passes, on the device."""
        self.directions.step = self.step_count
        if callable(batch) and not isinstance(batch, Mapping):
            self.model.apply_deferred()
            self.directions.prepare([])
            losses = losses_at_looks(batch, self.directions, self.estimator.pairs)
        else:
            losses = self._losses(self.model.checked(batch))
        self.projected, coefficients = self.estimator.estimate(losses)
        decay = self.settings.weight_decay
        coef, finite = torch.cat([losses.new_full((1,), self.lr), coefficients]), torch.isfinite(losses).all()
        self.latest = Pending(torch.where(finite, coef, torch.zeros_like(coef)), self.step_count, decay)
        self.update.defer(self.latest)
        self.directions.updated(self.latest)
        self.step_count += 1
        if not self.settings.deferred_update:
            self.update.flush()
        return losses.mean()

    def _losses(self, batches: list[Batch]) -> torch.Tensor:
        """The loss at every look, over the micro-batches of all ranks."""
        looks = look_at(self.model, self.estimator.pairs, batches, self.model.ranks)
        self.model.apply_deferred(before_step_of=self)
        self.directions.prepare(batches)
        if self.step_count == self.settings.fp8_steps and self.model.formats.codec is not None and not self.light:
            warnings.warn(f"wire: {self.settings.refusal(self.step_count + 1)}", stacklevel=4)  # in a user's own loop
        self.update.begin()
        parts = [batch.loss.total(x) for x, batch in zip(self.recorded.run(looks), looks.passes, strict=True)]
        own = torch.stack(parts) if parts else torch.zeros(0, device=self.model.device)
        sums = self.model.ranks.in_order(own, [looks.count] * looks.looks)
        return sums.view(looks.looks, -1).sum(dim=1) / max(1, looks.loss_count)

    @property
    def rows_ahead(self) -> tuple[int, int] | None:
        return (self.guide.rows, self.guide.tokens) if self.guide is not None and self.guide.is_due else None

    def look_ahead(self, batches: Sequence[Batch]) -> None:
        if self.guide is None:
            raise UserError("look_ahead: directions are random, and nothing is found from rows; make ZO with guide=N")
        most = self.model.pass_tokens and max(self.model.pass_tokens, self.guide.tokens)
        self.guide.ahead = split_all(self.model.checked(batches, of_step=False), "auto", most)

    # -- between steps ---------------------------------------------------------------------------------------------

    @property
    def deferred(self) -> Callable[[], None]:
        """The flush of the update, which outlives the method."""
        return self.update.flush

    @property
    def is_settled(self) -> bool:
        """Whether no update waits for the next visit of the weights."""
        return self.update.pending is None

    def owes(self, unit: Unit) -> bool:
        """Whether the unit's home lacks an update."""
        return self.directions.owes(unit)

    def describe(self) -> list[str]:
        """Lines for the start block: the decisions made."""
        own, drops = self.settings, dropout_rates(self.model.module)
        drawn = f"{own.count} direction{'s' * (own.count > 1)} ({own.distribution})"
        rule = f"estimator: {own.estimator}, {drawn}, eps {own.eps:g}: {own.passes} forward passes per step"
        off = ["dropout of the model: off, since zo compares losses of the same function"] if drops else []
        return [rule, *self.directions.describe(), *off]

    def _flush(self) -> None:
        self.update.flush()

    def replay(self, updates: list[Pending]) -> None:
        """Applies known updates."""
        self.directions.replay(updates)

    def metrics(self) -> dict[str, torch.Tensor | float]:
        """Scalars of the last step, on the device. `changed`: share of the weights that the update before it
        changed."""
        if self.projected is None:
            return {}
        return {"projected_grad": self.projected.abs().mean(), "changed": self.directions.changed_share}

    def _state(self) -> State:
        """The noise needs no state besides the step count. Flush first."""
        self.flush()
        return self._counts() | {"changed": int(self.update.changed)}

    def _deferred_state(self) -> State | None:
        """The state without a flush, while an update waits for the next visit of the weights."""
        return None if self.is_settled or self.light else self._counts()

    def _counts(self) -> State:
        counts: State = {"step_count": self.step_count, "seed": self.settings.seed}
        return counts | self.directions.state()

    def journal_update(self) -> torch.Tensor | None:
        """[lr, c_1 .. c_q] of the last step, applied or not."""
        return None if self.latest is None else self.latest.coef

    def _load(self, state: Saved) -> None:
        steps = int(state["step_count"])
        self.directions.load(state, steps)
        self.step_count = steps
        self.update.changed.fill_(state.get("changed", 0))
