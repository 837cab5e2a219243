"""What cannot be differentiated block by block, and why."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from keyhole.errors import UserError, listed
from keyhole.model.backward.memory import HELD
from keyhole.model.model import Model
from keyhole.model.recorder import is_known
from keyhole.model.structure.layout import Unit
from keyhole.model.weights.format import PACKED

LEAST_SCALE = 256.0  # of a GradScaler, which begins with 65536


def check_model(model: Model, activations: str, units_of: dict[int, list[Unit]]) -> None:
    """Refuses models that cannot be differentiated block by block as they were loaded."""
    engine = model.engine
    trains = any(tensor.param.requires_grad for tensor in model.layout.tensors)
    if trains and any(home.dtype == PACKED for home in engine.homes):
        raise UserError("wire: packed weights have no gradient to add up in; use bf16, fp16 or fp32")
    if activations == "none" and engine.streamed:
        raise UserError("activations: none keeps graphs that need all weights on the device; use block or host")
    needed = max((sum(u.index in engine.streamed for u in units) for units in units_of.values()), default=0)
    needed += HELD if any(u.expert is not None and u.index in engine.streamed for u in model.layout.units) else 0
    if engine.slot_count < needed:
        raise UserError(
            f"slot_count: {engine.slot_count} is too few: a block has {needed} streamed units, and a reverse needs all "
            f"of them on the device at the same time. Load with workload=keyhole.Workload(method=...), which plans for "
            f"it, or with slot_count={needed} or more"
        )


def check_loss(model: Model, loss: Any) -> None:
    """UserError if the loss is none that the module has computed with a graph, all weights being at home."""
    if not model.device_weights.is_plain or model.sharded:
        raise UserError("backward(loss) needs every weight on the device in its dtype; call step(batch) instead")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"as a {type(loss).__name__}"
        raise UserError(f"backward(loss): found one {found}, expected a tensor with one number: the loss")
    if not loss.requires_grad:
        raise UserError("backward(loss): this loss has no graph; compute it with gradients enabled")
    _check_later_hooks(model)
    node: Any = loss.grad_fn
    with refused_losses():
        factor: Any = node._saved_other if node is not None and node.name() == "MulBackward0" else None
    is_one = factor is not None and factor.dtype == torch.float32 and factor.numel() == 1
    if is_one and factor >= LEAST_SCALE and math.frexp(factor)[0] == 0.5:  # a power of two in a tensor
        raise UserError(
            "backward(loss): a GradScaler has multiplied this loss, and its factor would become part of the update; "
            "give backward the loss itself, without scaler.scale, scaler.step and scaler.update (in float16 lomo and "
            "its kin scale by themselves; bfloat16 needs no scale)"
        )


def check_hooks(model: Model) -> None:
    """UserError if a parameter has a hook for its gradient: in a step most gradients exist in part only, or as factors,
    and the hook would not be called with them."""
    hooked = [tensor.name for tensor in model.layout.tensors if tensor.param._backward_hooks]
    if hooked:
        raise UserError(
            f"step(batch): {listed(hooked)} has a gradient hook (register_hook), which a step does not call, since it "
            "never holds all of a gradient. backward(loss) calls it; for clipping there are max_grad_norm and (lomo) "
            "clip_value"
        )
    _check_later_hooks(model)


def _check_later_hooks(model: Model) -> None:
    """UserError if a parameter has a hook for its accumulated gradient: it is never accumulated."""
    hooks = {tensor.name: (tensor.param._post_accumulate_grad_hooks or {}).values() for tensor in model.layout.tensors}
    if after := [name for name, found in hooks.items() if not all(map(is_known, found))]:
        raise UserError(
            f"gradients: {listed(after)} has a hook of yours (register_post_accumulate_grad_hook), and no gradient is "
            "accumulated here: each is used and dropped while the next ones are computed. Remove the hook"
        )


@contextmanager
def refused_losses() -> Iterator[None]:
    """A context for loss.backward(): a UserError if the weights are not those that the loss was computed with."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise UserError(
                "backward(loss): this loss, or a part of it, was differentiated before, and autograd has freed its "
                "graph; compute the loss again for every backward(loss)"
            ) from error
        if "modified by an inplace operation" not in str(error):
            raise
        raise UserError(
            "backward(loss): the weights have changed since this loss was computed, by another backward or step; "
            "compute it after them"
        ) from error
