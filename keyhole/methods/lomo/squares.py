"""The squared norm of the whole gradient, with bits that do not depend on the order in which gradients arrive.

    ||g||^2 = sum over tensors t of s_t,        s_t = sum of the squares of t's gradient

The order of gradients depends on how a backward pass runs: linear layers offer their products early, autograd delivers
other gradients later, and a block that runs as a CUDA graph (model/backward/recorded.py) hands over everything at its
end. Sums in float32 depend on their order, and exact clipping multiplies every gradient by a function of this sum. So
each tensor, each chunk of a table and each expert has a place of its own, and the places are summed in the order of the
layout. Bytes: 4 per place. The places have fixed addresses, so that kernels that add to them can be captured.
"""

from bisect import bisect_right

import torch

from keyhole.model.structure.layout import FlatTensor, Layout


class Squares:
    """s_t per tensor, and one more sum for parameters beside the model's."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        starts = {tensor.start for tensor in layout.tensors}
        starts |= {unit.start for unit in layout.units if unit.rows is not None}
        starts |= {t.expert(e).start for t in layout.tensors for e in range(t.experts)}
        self.starts = sorted(starts)
        self.sums = torch.zeros(len(self.starts) + 1, device=device)
        *self.places, self.extra = self.sums.unbind()

    def of(self, tensor: FlatTensor) -> torch.Tensor:
        """The place to which the squares of this gradient, or of some of its elements, are added."""
        return self.places[bisect_right(self.starts, tensor.start) - 1]

    def total(self) -> torch.Tensor:
        return self.sums.sum()

    def zero_(self) -> None:
        self.sums.zero_()
