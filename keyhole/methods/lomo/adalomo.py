"""AdaLOMO: LOMO with a step size for every weight, from a second moment kept as one number per row and one per column.

For a matrix [R, C] with gradient g (ops/adalomo.py has the equations in full):

    row, col <- running means of g^2 over columns, over rows         R + C numbers in fp32 instead of R C
    u = g / sqrt(row x col / mean(row))                              then divided by max(1, rms(u))
    w <- round(w - lr max(1e-3, rms(w)) (u + weight_decay w))

The two norms, of the update and of the weight, are per matrix ("grouped"), so they need no second backward pass.
Vectors keep a full second moment. An expert of a stack is a matrix of its own, and so is a chunk of a large table
(embedding or head, 8,192 rows), wherever it lies: its gradient exists only while it is visited, so sums over the whole
table would need it two times more. Everything else is LOMO's.
"""

from typing import Any

import torch

from keyhole import ops
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.lomo.traits import ADALOMO
from keyhole.methods.lomo.update import Update
from keyhole.model.structure.layout import FlatTensor
from keyhole.ops.adalomo import moment_decay


class AdaLOMOUpdate(Update):
    """The rule with its moments."""

    whole_tensors = True
    keys = frozenset({"lost", "row", "col", "v"})

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stacks = {id(t.param): t for t in self.model.layout.tensors if t.stacked}

    def moments_of(self, tensor: FlatTensor) -> dict[str, torch.Tensor]:
        """For an expert: its slice of the stack's moments."""
        whole = self.stacks.get(id(tensor.param), tensor)
        kept = self.kept[whole.name]
        if not kept.keys() - {"lost"}:
            kept |= ops.adalomo_state(whole.shape, self.model.device)
        state = {key: value for key, value in kept.items() if key != "lost"}
        if whole.shape == tensor.shape:
            return state
        expert = (tensor.start - whole.start) // tensor.shape.numel()
        return {key: value[expert] for key, value in state.items()}

    def rule(
        self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, lr: float, decay: float, how: dict[str, Any]
    ) -> None:
        rate: Any = lr
        beta = None
        if self.numbers is not None and self.update_key is not None:
            rate, beta, how["step"] = self.numbers.lr, self.numbers.beta, self.numbers.step
        state = self.moments_of(tensor)
        when: dict[str, Any] = {"lr": rate, "beta": beta, "t": self.now.step}
        ops.adalomo_update_(w, grad, state, weight_decay=decay, scale=self.scale, **when, **how)


class AdaLOMO(LOMO):
    """LOMO with a factored second moment. Its rate is relative to the size of the weights: 1e-4 to 1e-3, not SGD's."""

    row = ADALOMO
    rule = AdaLOMOUpdate

    @property
    def _beta(self) -> float:
        return moment_decay(self.step_count)
