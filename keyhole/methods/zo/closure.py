"""A zeroth-order step for any loss that can be computed from the model, differentiable or not.

    opt.step(closure)        closure() -> a number, from model.nll, model.logits or model.generate

Zeroth-order steps need losses, not gradients, so the loss may be an accuracy, an F1, or a reward of generated text. The
closure is called once per look of the estimator (estimators/base.py), each time with the model *seen through* perturbed
weights: units are perturbed as they arrive, streamed or resident, and the homes are not changed. The closure returns
the losses of the step; update, journal, checkpoints and replay are those of any other step.

The update of the step before is applied first, which is one more visit of every unit. Every evaluation in the closure
is a sweep of its own: as many sweeps per step as looks, where a batch takes one. The noise is that of a step on a
batch. Closures are not possible with an estimator that splits rows between its directions, since only batches have
rows, nor during a search for a rate. With zo.guide the rows for the directions of a period must be given before
(look_ahead): the closure's own are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.model.structure.layout import Unit

if TYPE_CHECKING:
    from keyhole.methods.zo.estimators.base import Pair
    from keyhole.methods.zo.method import ZO

Closure = Callable[[], Any]


class Perturbed:
    """The weights of a model at one look, as a lens (model/forward/device_weights.py). number: of the pair; side: of
    the look within the pair."""

    def __init__(self, zo: ZO, number: int, pair: Pair, side: int) -> None:
        self.zo, self.number, self.pair, self.side = zo, number, pair, side
        self.is_used = False  # every evaluation looks up rows of the table

    def weights(self, unit: Unit, stored: torch.Tensor) -> torch.Tensor:
        """The unit's perturbed weights, in memory that the next unit reuses (the spine has its own)."""
        zo = self.zo
        if zo.factors is not None and unit.index in zo.factors.units:  # the layers add the perturbation
            return zo.model.in_compute_dtype(unit, stored)
        if unit.kind == "spine":
            both = zo.spines[self.number]
        else:
            both = zo.plus[: unit.numel], zo.minus[: unit.numel]
        zo.update.perturb(unit, stored, both[0], both[1], zo.perturbation(self.pair), arrived=False)
        return both[self.side]

    def rows(self, stale_MH: torch.Tensor, ids_M: torch.Tensor) -> torch.Tensor:
        """Perturbed rows of the table."""
        self.is_used = True
        zo, table = self.zo, self.zo.model.layout.table
        if not table.param.requires_grad:
            return stale_MH
        step = ops.ZOStep(table.start, **zo.noise, **zo.perturbation(self.pair))
        return ops.zo_rows(stale_MH, ids_M, step, zo.model.dtype)[self.side]


def takes_closure(step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Makes a step accept a closure in place of a batch."""

    @wraps(step)
    def either(zo: ZO, batch: Any) -> torch.Tensor:
        return closure_step(zo, batch) if callable(batch) and not isinstance(batch, Mapping) else step(zo, batch)

    return either


@torch.no_grad()
def closure_step(zo: ZO, closure: Closure) -> torch.Tensor:
    """One step; returns the loss of the step, as the estimator computes it."""
    if zo.estimator.splits or zo.search is not None:
        why = "a search for a rate" if zo.search is not None else f"estimator {zo.estimator.name}"
        raise UserError(f"closure: {why} needs the rows of a batch; use estimator=mezo or fzoo, and give a rate")
    zo.model.apply_deferred()
    if zo.guide is not None:
        zo.guide.renew(zo, [])
    losses = []
    if zo.factors is not None:
        zo.factors.perturb([zo.perturbation(pair) for pair in zo.estimator.pairs])
    for number, pair in enumerate(zo.estimator.pairs):
        for side in range(pair.looks):
            look = nullcontext() if zo.factors is None else zo.factors.seen_at(2 * number + side)
            perturbed = Perturbed(zo, number, pair, side)
            with zo.model.device_weights.seen_through(perturbed), look:
                losses.append(_number(closure(), zo.model.device))
            if not perturbed.is_used and torch.isfinite(losses[-1]):  # else there is no update
                raise UserError(
                    "closure: it has evaluated nothing at the perturbed weights, and its number says nothing of them; "
                    "compute it from model.nll(batch), model.logits(batch) or model.generate(ids), in every call"
                )
    found = torch.stack(losses)
    estimate = zo.estimator.estimate(found, zo.memory)
    zo.defer(estimate, found, estimate.memory, zo.rate)
    if not zo.deferred_update:
        zo.flush()
    return zo.estimator.loss(found)


def _number(found: Any, device: torch.device) -> torch.Tensor:
    try:
        value = torch.as_tensor(found, dtype=torch.float32, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"closure: found a {type(found).__name__}, expected a number: the loss") from error
    if value.numel() != 1:
        raise UserError(f"closure: found a tensor of shape {tuple(value.shape)}, expected one number: the loss")
    return value.reshape(())
