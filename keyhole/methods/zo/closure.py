"""A zeroth-order step for any loss: whatever can be computed from the model, differentiable or not.

    opt.step(closure)        closure() -> a number, from model.nll, model.logits or model.generate

MeZO needs losses, not gradients, so the loss may be an accuracy, an F1, a reward of generated text. The closure is
called 2 q times, each time with the model *seen through* w + eps z_i or w - eps z_i: its units are perturbed as they
arrive, streamed or resident, and the homes are not touched. What the closure returns are the losses of the step; the
update is that of any other step, and so are journal, checkpoints and replay.

The update of the step before is applied first, which is one more visit of every unit; and every evaluation in the
closure is a sweep of its own: 2 q sweeps per step where a batch takes one. The noise is that of a step on a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.model.structure.layout import Unit

if TYPE_CHECKING:
    from keyhole.methods.zo.method import ZO

Closure = Callable[[], Any]


class Perturbed:
    """The weights of a model at one place near them, for `Model.seen_through`."""

    def __init__(self, zo: ZO, direction: int, sign: int) -> None:
        self.zo, self.direction, self.sign = zo, direction, sign

    def weights(self, unit: Unit, stored: torch.Tensor) -> torch.Tensor:
        """The unit's perturbed weights, in memory that the next unit uses again (the spine has its own)."""
        zo = self.zo
        if unit.kind == "spine":
            both = zo.spines[self.direction]
        else:
            both = zo.plus[: unit.numel], zo.minus[: unit.numel]
        zo.update.perturb(unit, stored, both[0], both[1], zo._perturbation(self.direction))
        return both[self.sign]

    def rows(self, stale_MH: torch.Tensor, ids_M: torch.Tensor) -> torch.Tensor:
        """Perturbed rows of the table."""
        zo, table = self.zo, self.zo.model.layout.table
        if not table.param.requires_grad:
            return stale_MH
        step = ops.ZOStep(table.start, **zo.noise, **zo._perturbation(self.direction))
        return ops.zo_rows(stale_MH, ids_M, step, zo.model.dtype)[self.sign]


def takes_closure(step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A step that takes a closure too."""

    @wraps(step)
    def either(zo: ZO, batch: Any) -> torch.Tensor:
        return closure_step(zo, batch) if callable(batch) and not isinstance(batch, Mapping) else step(zo, batch)

    return either


@torch.no_grad()
def closure_step(zo: ZO, closure: Closure) -> torch.Tensor:
    """One step; returns the mean of the losses."""
    zo.model.apply_deferred()
    losses = []
    for direction in range(zo.directions):
        for sign in (0, 1):
            with zo.model.seen_through(Perturbed(zo, direction, sign)):
                losses.append(_number(closure(), zo.model.device))
    losses_q2 = torch.stack(losses).view(zo.directions, 2)
    zo._defer(losses_q2)
    if not zo.deferred_update:
        zo.flush()
    return losses_q2.mean()


def _number(found: Any, device: torch.device) -> torch.Tensor:
    try:
        value = torch.as_tensor(found, dtype=torch.float32, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"closure: found a {type(found).__name__}, expected a number: the loss") from error
    if value.numel() != 1:
        raise UserError(f"closure: found a tensor of shape {tuple(value.shape)}, expected one number: the loss")
    return value.reshape(())
