"""APOLLO-Mini inside the reverse sweep: the step size of Adam for every matrix, from a rank-1 sketch of its gradient.

For a matrix of a block with gradient G [m, n] whose shorter side is m (the other case mirrors it), P [m] from N(0, 1),
in its t-th update:

    R = P G                                              [n], a sketch of the gradient
    M, V <- running means of R and of R^2                8 n bytes instead of Adam's 8 m n
    s = |M / (sqrt(V) + eps)| / |R|
    l <- min(s |G|, GROWTH l)                            in its first update s |G|
    W <- round(W - lr (c scale l G / |G| + weight_decay W))                 c = sqrt(1 - beta2^t) / (1 - beta1^t)

The update has the gradient's direction; its length is adaptive, one number per matrix, for which a rank-1 sketch is
enough (Zhu et al., APOLLO: SGD-like Memory, AdamW-level Performance, 2024, and its code). P is a function of (seed,
tensor, t // refresh), never stored. The length may grow at most by the factor GROWTH from one step to the next, before
c corrects the means for their start at 0 and before `scale`. Embedding, head, vectors and whatever else is no matrix of
a block get AdamW at the same rate, with eps beside the root of the uncorrected second moment, as there; its moments are
in host memory (lomo/adam_pages.py), in 16 bits if the model computes in 16. In a stack of experts each has its own step
size. A length of 0 does not limit the next one, which the published code would keep near 0 for good.

The rule needs the gradient of one matrix at a time, as LOMO's backward pass provides it; everything else is LOMO's.
"""

import torch

from keyhole import ops
from keyhole.methods.apollo_mini.memory import PAGING
from keyhole.methods.apollo_mini.traits import APOLLO_MINI, APOLLOMiniConfig
from keyhole.methods.lomo.adam_pages import AdamPages
from keyhole.methods.lomo.method import LOMO
from keyhole.model.structure.layout import FlatTensor

GROWTH = 1.01
TINY = 1e-8  # is added to a norm before it divides


class APOLLOUpdate(AdamPages):
    """The rule with its state."""

    own: APOLLOMiniConfig
    keys = frozenset({"lost", "sketch_avg", "sketch_avg_sq", "length"})
    paging, eps_first = PAGING, True

    def of_a_matrix(
        self, tensor: FlatTensor, grad: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, float, torch.Tensor]:
        own, kept = self.own, self.kept[tensor.name]
        sketch = self._sketch(tensor, grad, (count - 1) // own.refresh) * self.scale
        last = kept.setdefault("length", torch.zeros_like(self.scale))
        mean, square = (kept.setdefault(name, torch.zeros_like(sketch)) for name in ("sketch_avg", "sketch_avg_sq"))
        mean.lerp_(sketch, 1 - own.beta1)
        square.mul_(own.beta2).addcmul_(sketch, sketch, value=1 - own.beta2)
        factor = ops.norm(mean / square.sqrt().add_(own.eps)) / (ops.norm(sketch) + TINY)
        length = factor * ops.norm(grad) * self.scale
        growth = torch.where(last > 0, GROWTH * (last + TINY) / length, 1.0).clamp(max=1.0)
        last.copy_(length * growth)
        corrected = (1 - own.beta2**count) ** 0.5 / (1 - own.beta1**count)
        return grad, 1.0, factor * growth * (own.scale * corrected) * self.scale

    def _sketch(self, tensor: FlatTensor, grad_MN: torch.Tensor, period: int) -> torch.Tensor:
        """P G or G P, in fp32, along the shorter side."""
        wide = grad_MN if grad_MN.shape[0] < grad_MN.shape[1] else grad_MN.t()
        p = ops.draw_noise(len(wide), offset=tensor.start, seed=self.own.seed, step=period, device=wide.device)
        if wide.is_cuda and wide.dtype != torch.float32:
            return torch.mm(p[None].to(wide.dtype), wide, out_dtype=torch.float32)[0]
        return torch.mv(wide.float().t(), p.to(wide.dtype).float())


class APOLLOMini(LOMO):
    """LOMO whose steps have Adam's length, matrix by matrix. Its rate is Adam's, not SGD's."""

    row = APOLLO_MINI
    rule = APOLLOUpdate
    waits = True  # its moments must not include a step that is skipped
