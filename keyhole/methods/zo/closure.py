"""A zeroth-order step for any loss that can be computed from the model, differentiable or not.

    opt.step(closure)        closure() -> a number, from model.nll, model.logits or model.generate

This file evaluates the closure (`losses_at_looks`); the step on these losses is the method's.

Zeroth-order steps need losses, not gradients, so the loss may be an accuracy, an F1, or a reward of generated text. The
closure is called once per look of the estimator (estimators.py), each time with the model *seen through* perturbed
weights: units are perturbed as they arrive, streamed or resident, and the homes are not changed. The closure returns
the losses of the step; update, journal, checkpoints and replay are those of any other step.

The update of the step before is applied first, which is one more visit of every unit. Every evaluation in the closure
is a sweep of its own: as many sweeps per step as looks, where a batch takes one. The noise is that of a step on a
batch. Closures are not possible during a search for a rate. With zo.guide the rows for the directions of a period must
be given before (look_ahead): the closure's own are not known.
"""

from collections.abc import Callable
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.zo.directions import Dense
from keyhole.methods.zo.estimators import Pair
from keyhole.model.structure.layout import Unit

Closure = Callable[[], Any]


class AtLook:
    """The weights of a model at one look, as a lens (model/forward/device_weights.py). number: of the pair; side: of
    the look within the pair."""

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
    model, losses = directions.model, []
    directions.begin_looks(pairs)
    for number, pair in enumerate(pairs):
        for side in range(pair.looks):
            lens = AtLook(directions, number, pair, side)
            with model.device_weights.seen_through(lens), directions.seen_at(2 * number + side):
                losses.append(_number(closure(), model.device))
            if not lens.is_used and torch.isfinite(losses[-1]):  # else there is no update
                raise UserError(
                    "closure: it has evaluated nothing at the perturbed weights, and its number says nothing of them; "
                    "compute it from model.nll(batch), model.logits(batch) or model.generate(ids), in every call"
                )
    return torch.stack(losses)


def _number(found: Any, device: torch.device) -> torch.Tensor:
    try:
        value = torch.as_tensor(found, dtype=torch.float32, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"closure: found a {type(found).__name__}, expected a number: the loss") from error
    if value.numel() != 1:
        raise UserError(f"closure: found a tensor of shape {tuple(value.shape)}, expected one number: the loss")
    return value.reshape(())
