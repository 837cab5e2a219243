"""AdaLOMO: LOMO with a step size for every weight, from a second moment kept as one number per row and one per column.

For a matrix [R, C] with gradient g (ops/adalomo/matrix.py has the equations in full):

    row, col <- running means of g^2 over columns, over rows         R + C numbers in fp32 instead of R C
    u = g / sqrt(row x col / mean(row))                              then divided by max(1, rms(u))
    w <- round(w - lr max(1e-3, rms(w)) (u + weight_decay w))

The two norms, of the update and of the weight, are taken over one tensor at a time ("grouped"), so they need no second
reverse. Vectors keep a full second moment. A table in chunks of rows (embedding, head) is a group a chunk, wherever it
lives. Everything else is LOMO's.
"""

from typing import Any

import torch

from keyhole import ops
from keyhole.methods.base import State
from keyhole.methods.lomo.method import LOMO
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor


class AdaLOMO(LOMO):
    """LOMO with a factored second moment. Its rate is relative to the size of the weights: 1e-4 to 1e-3, not SGD's."""

    name = "adalomo"

    def __init__(self, model: Model, lr: float = 5e-4, **options: Any) -> None:
        super().__init__(model, lr, **options)
        self.moments: dict[str, dict[str, torch.Tensor]] = {}

    def _adds_directly(self, w: torch.Tensor) -> bool:
        return False

    def _rule(
        self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, lr: float, weight_decay: float, scale: Any
    ) -> None:
        if tensor.name not in self.moments:
            self.moments[tensor.name] = ops.adalomo_state(w.shape, w.device)
        state, how = self.moments[tensor.name], self._rounding_of(tensor, w)
        if self.clip_value is not None:
            how["sum_squares"] = self._bound_elements(grad, scale, how["sum_squares"], tensor.start)
        ops.adalomo_update_(w, grad, state, lr=lr, t=self.step_count, weight_decay=weight_decay, scale=scale, **how)

    def _bound_elements(
        self, grad: torch.Tensor, scale: torch.Tensor | None, sum_squares: torch.Tensor | None, offset: int
    ) -> None:
        """Clamps the gradient in place (the bound is rounded to its dtype), once its norm is taken and inf was looked
        for."""
        out = torch.zeros_like(self.sum_squares) if sum_squares is None else sum_squares
        ops.sum_squares_(grad, out, scale, self.bad, offset=offset)
        bound = self.clip_value * self._factor
        grad.clamp_(-bound, bound)

    def state_dict(self) -> State:
        moments = {f"{name}/{key}": value for name, state in self.moments.items() for key, value in state.items()}
        return super().state_dict() | moments

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        for full_name, value in state.items():
            name, _, key = full_name.rpartition("/")
            if name and key != "lost":
                self.moments.setdefault(name, {})[key] = value.to(self.model.device)
