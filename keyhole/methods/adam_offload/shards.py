"""adam-offload on several ranks: gradients are added up, and each rank updates its part of every unit by Adam.

A unit's summed gradient (methods/shards.py), this rank's part of it, goes where the gradients of one process go
(exchange.py): to the part's own memory on the host; the worker turns it into new weights there, which stay there
(streamed) or return to the part on the device (resident). The next forward gathers them into a slot.

Norms are of whole tensors: each rank takes those of its pieces, and a few numbers per unit are gathered, so that all
ranks clip by the same norm and agree on what is not finite. Which tensors have a gradient is agreed on as well.

Bytes per rank and parameter of a unit that is shared out, N ranks, weights of b bytes: 12 / N of state and b / N of
weights or gradient in host memory, b / N on the device where it is resident. Table and spine are whole on every rank.
"""

from typing import Any

import torch

from keyhole.methods.shards import GradientParts
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Unit


class AdamParts(GradientParts):
    """A sink in front of AdamOffload."""

    def __init__(self, model: Model, method: Any) -> None:
        super().__init__(model)
        self.method = method

    def whole(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        self.method.gradient(tensor, w, grad)

    def finished(self, unit: Unit) -> bool:
        if unit.index in self.place:
            starts = [tensor.start for tensor in self.with_gradient(unit)]
            part = self.part_of(unit)
            if starts:
                self._send(unit, starts, part)
        return self.method.finished(unit)

    def _send(self, unit: Unit, starts: list[int], part: torch.Tensor) -> None:
        """The pieces of tensors with a gradient leave, and their norms become those of all ranks."""
        method, step = self.method, self.method.current
        self.model.engine.before_change(unit.index)  # on every rank, also where none of its elements are
        norms_K, first = step.norms(starts)[0], step.slots[starts[0]]
        own_K = torch.zeros_like(norms_K)
        for start in starts:
            begin, end = method.state.ours(method.state.trained[start])
            if begin < end:
                torch.linalg.vector_norm(part[begin:end], out=own_K[step.slots[start] - first])
                method.exchange.put(unit.index, begin, part[begin:end])
        torch.linalg.vector_norm(self.ranks.gather(own_K), dim=0, out=norms_K)
        step.starts[unit.index] = starts
