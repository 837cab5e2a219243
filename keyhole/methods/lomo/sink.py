"""LOMO's update from one gradient: the sink (model/backward/sink.py) of its reverse sweeps.

The gradient of a linear layer is computed in one buffer for all layers, and one kernel (ops/sgd.py) decays, clips,
updates, rounds, sums squares and checks for non-finite values. If nothing needs to read the gradient (grad_norm=False,
no clipping, rounding to nearest or float32), there is no buffer either: w.addmm_(dy^T, x) computes gradient and update
at once.

If there are two backward passes (exact clipping, float16), the first has a sink that only sums squares.
"""

import re
from collections.abc import Hashable
from typing import Any

import torch

from keyhole import ops
from keyhole.methods.lomo.squares import Squares
from keyhole.methods.step_numbers import StepNumbers
from keyhole.methods.weight_decay import WeightDecay
from keyhole.model.backward.sink import Sink, SinkPolicy
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Unit


class UpdateSink(Sink):
    """The sink of the second backward pass, or of the only one: every gradient updates its tensor. Its settings are the
    method's."""

    policy = SinkPolicy(by_expert=True)
    model: Model
    lr: float
    settings: Any
    decay: WeightDecay
    groups: list[dict[str, Any]]
    step_count: int
    norm: torch.Tensor | None  # of the whole gradient, once it is known
    squares: Squares
    bad: torch.Tensor
    changed: torch.Tensor
    buffer: torch.Tensor  # has room for the largest matrix
    compensation: dict[str, torch.Tensor]  # rounding errors kept by Kahan summation
    table_squares: dict[int, torch.Tensor]  # id(param) -> sum of squares of its gradient, for tables of several chunks
    received: set[str]  # names of tensors that had a gradient in this step
    grad_scale: torch.Tensor | None  # factor of the gradients
    numbers: StepNumbers | None  # set if updates may be captured as CUDA graphs

    @property
    def surveys(self) -> int:
        """One survey if the norm of each tensor is needed: that of a table is over all its chunks."""
        return 0 if self.settings.clip_group_norm is None else 1

    @property
    def update_key(self) -> Hashable | None:
        """Everything that the launches of `_rule` depend on: constant settings, and whether the norm is measured."""
        fixed = not self.groups and self.settings.clip_group_norm is None and self.settings.rounding != "kahan"
        return ("update", self._adds_to_norm) if self.numbers is not None and fixed else None

    def updated(self, tensors: list[FlatTensor]) -> None:
        self.received |= {tensor.name for tensor in tensors}

    def survey(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, turn: int) -> None:
        """Adds a chunk's squares to those of its table."""
        squares = self._measured_squares(tensor, grad)
        self.table_squares[id(tensor.param)] = squares + self.table_squares.get(id(tensor.param), 0.0)

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """Adds dy^T x directly to the weight, or computes it in the buffer."""
        if self._adds_directly(w_OI):
            self.received.add(tensor.name)
            lr, weight_decay = self._rates(tensor)
            w_OI.addmm_(dy_MO.t(), x_MI, beta=1 - lr * weight_decay, alpha=-lr)
            return True
        grad_OI = self.buffer[: w_OI.numel()].view(w_OI.shape)
        torch.mm(dy_MO.t(), x_MI, out=grad_OI)
        self.gradient(tensor, w_OI, grad_OI)
        return True

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Updates one tensor; in a stack of experts, each expert as a matrix of its own."""
        if tensor.experts and w.dim() == 3:
            for e, met in enumerate(grad.flatten(1).any(dim=1).tolist()):
                expert = tensor.expert(e)
                if met or not self.unmet(expert):
                    self.gradient(expert, w[e], grad[e])
            return
        self.received.add(tensor.name)
        lr, weight_decay = self._rates(tensor)
        self._rule(tensor, w, grad.contiguous(), lr, weight_decay, self._scale_of(tensor, grad))

    def unmet(self, tensor: FlatTensor) -> bool:
        """Leaves an expert without tokens unchanged, weights and state, unless its weights decay."""
        return self._rates(tensor)[1] == 0

    def finished(self, unit: Unit) -> bool:
        """Reports that the unit's weights have changed."""
        return True

    def _rule(
        self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, lr: float, weight_decay: float, scale: Any
    ) -> None:
        how = self._rounding_of(tensor, w)
        rate: Any = lr
        if self.numbers is not None and self.update_key is not None:
            rate, how["step"] = self.numbers.lr, self.numbers.step
        clip = {"scale": scale, "clip_value": self.settings.clip_value}
        ops.sgd_update_(w, grad, lr=rate, weight_decay=weight_decay, **clip, **how)

    def _rounding_of(self, tensor: FlatTensor, w: torch.Tensor) -> dict[str, Any]:
        """Arguments of an op: how one update is rounded, and where it is counted."""
        rounding = "nearest" if w.dtype == torch.float32 else self.settings.rounding
        if rounding == "kahan" and tensor.name not in self.compensation:
            self.compensation[tensor.name] = torch.zeros_like(w)
        lost = self.compensation[tensor.name] if rounding == "kahan" else None
        where = {"offset": tensor.start, "seed": self.settings.seed, "step": self.step_count}
        sums = {
            "sum_squares": self.squares.of(tensor)
            if self._adds_to_norm and self.settings.clip_group_norm is None
            else None
        }
        return {"rounding": rounding, "compensation": lost, "bad": self.bad, "changed": self.changed, **where, **sums}

    def _adds_directly(self, w: torch.Tensor) -> bool:
        clips = (
            self.settings.clip_value is not None
            or self.settings.clip_group_norm is not None
            or self.grad_scale is not None
        )
        exact = w.dtype == torch.float32 or self.settings.rounding == "nearest"
        return not (clips or self.settings.grad_norm) and exact and w.dtype == self.model.dtype

    @property
    def _adds_to_norm(self) -> bool:
        """Whether this backward pass measures the norm of the whole gradient."""
        return self.norm is None and self.settings.grad_norm

    def _measured_squares(self, tensor: FlatTensor, grad: torch.Tensor) -> torch.Tensor:
        """The sum of squares of a gradient; also adds it to the norm of the whole gradient."""
        squares = torch.zeros((), device=grad.device)
        ops.sum_squares_(grad.contiguous(), squares, self.grad_scale)
        if self._adds_to_norm:
            self.squares.of(tensor).add_(squares)
        return squares

    def _scale_of(self, tensor: FlatTensor, grad: torch.Tensor) -> torch.Tensor | None:
        """The factor of a tensor's gradient."""
        if self.settings.clip_group_norm is None:
            return self.grad_scale
        squares = self.table_squares.get(id(tensor.param))
        return self._group_scale(self._measured_squares(tensor, grad) if squares is None else squares)

    def _group_scale(self, squares: torch.Tensor) -> torch.Tensor:
        """The factor from the sum of squares of a gradient: its norm becomes at most clip_group_norm."""
        assert self.settings.clip_group_norm is not None
        clip = (self.settings.clip_group_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        return clip if self.grad_scale is None else clip * self.grad_scale

    def _rates(self, tensor: FlatTensor) -> tuple[float, float]:
        decay = self.decay.of(tensor.param)
        for group in self.groups:
            if re.search(group["match"], tensor.name):
                return self.lr * group.get("lr_scale", 1.0), group.get("weight_decay", decay)
        return self.lr, decay


class NormSink(Sink):
    """The sink of the first of two backward passes: sums squares and changes nothing."""

    policy = SinkPolicy(by_expert=True)

    def __init__(self, method: UpdateSink) -> None:
        self.method = method

    @property
    def update_key(self) -> Hashable | None:
        return None if self.method.update_key is None else "norm"

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        grad_OI = self.method.buffer[: w_OI.numel()].view(w_OI.shape)
        torch.mm(dy_MO.t(), x_MI, out=grad_OI)
        self.gradient(tensor, w_OI, grad_OI)
        return True

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        total, scale = self.method.squares.of(tensor), self.method.grad_scale
        ops.sum_squares_(grad.contiguous(), total, scale, offset=tensor.start)
