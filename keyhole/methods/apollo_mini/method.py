"""APOLLO-Mini inside the reverse sweep: the step size of Adam for every matrix, from a rank-1 sketch of its gradient.

For a matrix with gradient G [m, n] whose shorter side is m (the other case mirrors it), and P [m] from N(0, 1):

    R = P G                                              [n], a sketch of the gradient
    M, V <- running means of R and of R^2                8 n bytes instead of Adam's 8 m n
    s = |M' / (sqrt(V') + eps)| / |R|                    M', V': corrected for their start at 0
    W <- round(W - lr (scale s G + weight_decay W))

The update has the gradient's direction; its length is adaptive, one number per matrix, for which a rank-1 sketch is
enough (Zhu et al., APOLLO: SGD-like Memory, AdamW-level Performance, 2024). P is a function of (seed, tensor, period):
it is drawn again every `refresh` steps and never stored. As in the paper, the step of a matrix may grow at most by the
factor GROWTH from one step to the next. Vectors get Adam's rule, with full-size moments.

The rule needs the gradient of one matrix at a time, as LOMO's backward pass provides it; everything else is LOMO's. A
chunk of a table (embedding, head) is a matrix of its own, wherever the table lives.
"""

from typing import Any

import torch

from keyhole import ops
from keyhole.methods.apollo_mini.traits import APOLLO_MINI, APOLLOMiniConfig
from keyhole.methods.base import Saved, State
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.lomo.update import Now, Update
from keyhole.model.structure.layout import FlatTensor

GROWTH = 1.01
UPDATES = "updates"  # in a state, after the name of a tensor that had fewer than steps
TINY = 1e-30  # smaller than any norm that matters


class APOLLOUpdate(Update):
    """The rule with its moments."""

    own: APOLLOMiniConfig
    whole_tensors = True
    keys = frozenset({"lost", "exp_avg", "exp_avg_sq", "length"})

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.updates: dict[str, int] = {}  # of a tensor; fewer than steps if it was frozen, or had no gradient

    def rule(
        self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, lr: float, decay: float, how: dict[str, Any]
    ) -> None:
        if (total := how.pop("sum_squares")) is not None:  # of the unscaled gradient
            ops.sum_squares_(grad, total, self.scale, how["bad"], offset=tensor.start)
        if w.ndim < 2:
            step, scale = self._adam(tensor.name, grad.float() * self.scale), None
        else:
            step, scale = grad, self._matrix_scale(tensor, grad.view(-1, grad.shape[-1]))
        ops.sgd_update_(w, step, lr=lr, weight_decay=decay, scale=scale, **how)

    def _matrix_scale(self, tensor: FlatTensor, grad_MN: torch.Tensor) -> torch.Tensor:
        """The factor of the gradient of a matrix."""
        sketch = self._sketch(tensor, grad_MN) * self.scale
        length = torch.linalg.vector_norm(grad_MN, dtype=torch.float32) * self.scale
        step = torch.linalg.vector_norm(self._adam(tensor.name, sketch))
        factor = step / torch.linalg.vector_norm(sketch).clamp(min=TINY)
        last = self.kept[tensor.name].setdefault("length", torch.zeros_like(length))
        growth = torch.where(last > 0, GROWTH * last / (factor * length).clamp(min=TINY), 1.0)
        factor = factor * growth.clamp(max=1.0)
        last.copy_(factor * length)
        return factor * self.own.scale * self.scale

    def _sketch(self, tensor: FlatTensor, grad_MN: torch.Tensor) -> torch.Tensor:
        """P G or G P, in fp32, along the shorter side."""
        short, period = min(grad_MN.shape), (self.now.step - 1) // self.own.refresh
        p = ops.draw_noise(short, offset=tensor.start, seed=self.own.seed, step=period, device=grad_MN.device)
        wide = grad_MN if grad_MN.shape[0] == short else grad_MN.t()
        if wide.is_cuda and wide.dtype != torch.float32:
            return torch.mm(p[None].to(wide.dtype), wide, out_dtype=torch.float32)[0]
        return torch.mv(wide.float().t(), p.to(wide.dtype).float())

    def _adam(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """Adam's step for a vector; updates its moments."""
        moments, own = self.kept[name], self.own
        if "exp_avg" not in moments:
            moments |= {"exp_avg": torch.zeros_like(grad), "exp_avg_sq": torch.zeros_like(grad)}
        count = self.updates[name] = self.updates.get(name, 0) + 1
        exp_avg = moments["exp_avg"].lerp_(grad, 1 - own.beta1)
        exp_avg_sq = moments["exp_avg_sq"].mul_(own.beta2).addcmul_(grad, grad, value=1 - own.beta2)
        root = exp_avg_sq.sqrt().div_((1 - own.beta2**count) ** 0.5).add_(own.eps)
        return (exp_avg / root).div_(1 - own.beta1**count)

    def state(self) -> State:
        return super().state() | {f"{name}/{UPDATES}": n for name, n in self.updates.items() if n != self.now.step}

    def load(self, state: Saved, step: int) -> None:
        super().load(state, step)
        self.now = Now(step=step)
        self.updates = {name: int(state.get(f"{name}/{UPDATES}", step)) for name in self.kept}


class APOLLOMini(LOMO):
    """LOMO whose steps have Adam's length, matrix by matrix. Its rate is Adam's, not SGD's."""

    row = APOLLO_MINI
    rule = APOLLOUpdate
    waits = True  # its moments must not include a step that is skipped
