"""adam-offload on several ranks: gradients are summed, and each rank updates its part of every unit by Adam.

This rank's part of a unit's summed gradient (methods/shards.py) goes the same way as gradients in one process
(exchange.py): to the part's staging memory on the host. The worker computes the new weights there, which stay there
(streamed) or return to the part on the device (resident). The next forward pass gathers them into a slot.

Norms are of whole tensors: each rank computes those of its pieces, and a few numbers per unit are gathered, so that all
ranks clip by the same norm and agree on what is not finite. They also agree on which tensors have a gradient.

The table is replicated on every rank, but its state is sharded: each rank updates its part of a chunk in place, and
before the chunk's next use the parts are gathered (Exchange calls `make_whole`, at the same point on all ranks). Every
rank updates the whole spine, which is a few vectors.

Bytes per rank and parameter, N ranks, weights of b bytes: 12 / N of state, and for sharded units b / N of weights or
gradient in host memory, b / N on the device if resident. Over the network a table takes 2 b (N - 1) / N.
"""

from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.adam_offload.exchange import Span
from keyhole.methods.shards import GradientParts
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Unit
from keyhole.offload.shards import part_numel


def own_ranges(model: Model) -> tuple[dict[int, tuple[int, int]], dict[int, Span]]:
    """For this rank: the first element and the number of elements that it updates, of units that it does not update
    whole; and their range [begin, end) in the homes of tables."""
    cut = {page: (begin, part.numel()) for page, (begin, part) in model.engine.parts().items()}
    slices: dict[int, Span] = {}
    tables = model.layout.of_kind("table") if model.sharded else []
    on_host = [unit.index in model.engine.on_host for unit in tables]
    if tables and any(its != on_host for its in model.ranks.objects(on_host)):  # a gather needs all parts alike
        raise UserError(
            "gpu_memory: a table would be streamed by some ranks and stay on the GPU of others, since other memory is "
            "free there; set gpu_memory to what all of them have"
        )
    for unit in tables:
        numel = part_numel(unit.numel, model.ranks.size)
        begin, end = (min(rank * numel, unit.numel) for rank in (model.ranks.rank, model.ranks.rank + 1))
        slices[unit.index], cut[unit.index] = (begin, end), (begin, end - begin)
    return cut, slices


@torch.no_grad()
def make_whole(model: Model, slices: dict[int, Span], page: int) -> None:
    """Gathers the parts of all ranks into the home of a table's chunk."""
    home, (begin, end) = model.engine.homes[page].data, slices[page]
    part = home.new_zeros(part_numel(home.numel(), model.ranks.size))
    part[: end - begin] = home[begin:end]
    whole = home.new_empty(part.numel() * model.ranks.size)
    model.ranks.gather_into(whole, part)
    home.copy_(whole[: home.numel()])


class AdamParts(GradientParts):
    """A sink in front of AdamOffload."""

    def __init__(self, model: Model, method: Any) -> None:
        super().__init__(model)
        self.method = method

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        unit = self.method.state.trained[tensor.start].unit
        if unit.index in self.method.exchange.slices:
            padded = grad.new_zeros(part_numel(unit.numel, self.ranks.size) * self.ranks.size)
            padded[: grad.numel()] = grad.reshape(-1)
            self._send(unit, [tensor.start], self.ranks.sum_of_parts(padded))
        else:
            super().gradient(tensor, w, grad)

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
        """Sends the pieces of tensors with a gradient, and replaces their norms by those over all ranks."""
        method, step = self.method, self.method.current
        method.exchange.will_change(unit.index)  # on every rank, also on one that has none of its elements
        norms_K, first = step.norms(starts)[0], step.slots[starts[0]]
        own_K = torch.zeros_like(norms_K)
        for start in starts:
            begin, end = method.state.ours(unit, start, method.state.trained[start].stop)
            if begin < end:
                torch.linalg.vector_norm(part[begin:end], out=own_K[step.slots[start] - first])
                method.exchange.put(unit.index, begin, part[begin:end])
        torch.linalg.vector_norm(self.ranks.gather(own_K), dim=0, out=norms_K)
        step.starts[unit.index] = starts
