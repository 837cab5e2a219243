"""AdaLOMO: LOMO with a step size for every weight, from a second moment kept as one number per row and one per column.

For a matrix [R, C] with gradient g (ops/adalomo/matrix.py has the equations in full):

    row, col <- running means of g^2 over columns, over rows         R + C numbers in fp32 instead of R C
    u = g / sqrt(row x col / mean(row))                              then divided by max(1, rms(u))
    w <- round(w - lr max(1e-3, rms(w)) (u + weight_decay w))

The two norms, of the update and of the weight, are per tensor ("grouped"), so they need no second backward pass.
Vectors keep a full second moment. An expert of a large stack is a matrix of its own. A table that is visited in chunks
of rows (embedding, head) is one tensor as well: table.py. Everything else is LOMO's.
"""

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from keyhole import ops
from keyhole.methods.base import State
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.lomo.table import TableUpdate
from keyhole.methods.lomo.traits import ADALOMO as ROW
from keyhole.model.structure.layout import FlatTensor
from keyhole.ops.adalomo.matrix import moment_decay


class AdaLOMO(LOMO):
    """LOMO with a factored second moment. Its rate is relative to the size of the weights: 1e-4 to 1e-3, not SGD's."""

    row = ROW

    def _setup(self) -> None:
        super()._setup()
        self.moments: dict[str, dict[str, torch.Tensor]] = {}
        self.tables: dict[int, TableUpdate] = {}  # of this step, by id(param): tables of several chunks
        self.tensors = {id(t.param): t for t in self.model.layout.tensors}

    @property
    def whole_tensors(self) -> bool:
        return True

    @property
    def shares_matrices(self) -> bool:
        return self.settings.clip_value is None and self.settings.clip_group_norm is None

    @property
    def update_key(self) -> Hashable | None:
        """Includes the loss scale with clip_value: elements are clamped before they are divided by the scale."""
        key = super().update_key
        return key if key is None or self.settings.clip_value is None else (key, self._factor)

    @property
    def surveys(self) -> int:
        """LOMO's surveys, then one for sums over the gradient of a table and one for sums over its update."""
        return super().surveys + 2

    def survey(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, turn: int) -> None:
        """Adds a chunk to the sums of its table."""
        if turn < super().surveys:
            super().survey(tensor, w, grad, turn)
            return
        key, first = id(tensor.param), self._first_row(tensor)
        first_turn = turn == super().surveys
        if first_turn and first == 0:
            moments = self._moments_of(self.tensors[key], w.device)
            self.tables[key] = TableUpdate(moments, self.step_count, self._scale_of(tensor, grad))
        if first_turn and self.settings.clip_group_norm is None:
            self._measured_squares(tensor, grad)
        self._bound_elements(grad)
        if first_turn:
            self.tables[key].add_gradient(first, w, grad)
        else:
            self.tables[key].add_update(first, grad)

    def _first_row(self, chunk: FlatTensor) -> int:
        return (chunk.start - self.tensors[id(chunk.param)].start) // chunk.shape[1]

    @property
    def _beta(self) -> float:
        return moment_decay(self.step_count)

    def _moments_of(self, tensor: FlatTensor, device: torch.device) -> dict[str, torch.Tensor]:
        """For an expert: its slice of the stack's moments."""
        whole = self.tensors[id(tensor.param)] if self._is_expert(tensor) else tensor
        if whole.name not in self.moments:
            self.moments[whole.name] = ops.adalomo_state(whole.shape, device)
        state = self.moments[whole.name]
        if whole is tensor:
            return state
        expert = (tensor.start - whole.start) // tensor.shape.numel()
        return {key: value[expert] for key, value in state.items()}

    def _is_expert(self, tensor: FlatTensor) -> bool:
        return self.tensors[id(tensor.param)].experts > 0

    def _adds_directly(self, w: torch.Tensor) -> bool:
        return False

    def _rule(
        self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, lr: float, weight_decay: float, scale: Any
    ) -> None:
        how = self._rounding_of(tensor, w)
        if tensor.shape != self.tensors[id(tensor.param)].shape and not self._is_expert(tensor):
            self._bound_elements(grad)
            self.tables[id(tensor.param)].change(self._first_row(tensor), w, grad, lr, weight_decay, how)
            return
        if self.settings.clip_value is not None:
            out = torch.zeros((), device=w.device) if how["sum_squares"] is None else how["sum_squares"]
            ops.sum_squares_(grad, out, scale, self.bad, offset=tensor.start)  # before elements are clamped
            self._bound_elements(grad)
            how["sum_squares"] = None
        state, beta = self._moments_of(tensor, w.device), None
        rate: Any = lr
        if self.numbers is not None and self.update_key is not None:
            rate, beta, how["step"] = self.numbers.lr, self.numbers.beta, self.numbers.step
        when: dict[str, Any] = {"lr": rate, "beta": beta, "t": self.step_count}
        ops.adalomo_update_(w, grad, state, weight_decay=weight_decay, scale=scale, **when, **how)

    def _bound_elements(self, grad: torch.Tensor) -> None:
        """Clamps a gradient in place to clip_value, rounded to its dtype."""
        if self.settings.clip_value is not None:
            bound = self.settings.clip_value * self._factor
            grad.clamp_(-bound, bound)

    def _state(self) -> State:
        moments = {f"{name}/{key}": value for name, state in self.moments.items() for key, value in state.items()}
        return super()._state() | moments

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self.moments.clear()
        for full_name, value in state.items():
            name, _, key = full_name.rpartition("/")
            if name and key != "lost":
                self.moments.setdefault(name, {})[key] = value.to(self.model.device, copy=True)
