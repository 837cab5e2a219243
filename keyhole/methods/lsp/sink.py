"""The sink of LSP's reverse sweep: sums the compressed gradients of each unit, until they are complete.

    linear      a product dy^T x of a linear layer: compressed to d x d numbers, and added to S
    gradient    a gradient that is no such product, or was not offered: the same

Each target has its place in the buffer of its unit (gradient_buffers.py). The step remembers which targets have
received something, and the weights that they belong to. `linear` is one kernel at fixed addresses, so it may be
captured together with the backward pass of a block (`RecordableSink`, model/backward/sink.py), unless gradients of the
block go to the host: then buffers alternate. What happens to complete gradients is in update.py.
"""

from collections.abc import Hashable
from typing import Any

import torch

from keyhole.methods.lsp.adam import DeviceAdam
from keyhole.methods.lsp.gradient_buffers import GradientBuffers, Targets, view_in
from keyhole.methods.lsp.step import LSPStep
from keyhole.methods.lsp.target import Target
from keyhole.model.backward.sink import RecordableSink, SinkPolicy
from keyhole.model.structure.layout import FlatTensor, Unit


class GradientSink(RecordableSink):
    """Receives the gradients of all targets. lengths: numbers of each unit's buffer; device: has the moments of the
    units whose gradients stay on the device."""

    policy = SinkPolicy(accumulates=True, by_factors=True)  # S sums every product of a linear layer

    def __init__(self, units: Targets, lengths: dict[int, int], gradients: GradientBuffers, device: DeviceAdam) -> None:
        self.lengths, self.gradients, self.device = lengths, gradients, device
        self.targets = {target.tensor.start: target for members in units.values() for target in members}
        self.current = LSPStep()

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """Adds the compressed product to S."""
        target = self.targets.get(tensor.start)
        if target is not None:
            target.add(*self._sum_of(target, w_OI), dy_MO, x_MI)
        return True

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Takes a gradient that does not come from a linear layer, or that was not offered."""
        target = self.targets.get(tensor.start)
        if target is not None:
            target.add_gradient(*self._sum_of(target, w), grad)

    # -- RecordableSink (model/backward/sink.py) -------------------------------------------------------------------

    def state(self, units: list[Unit]) -> Hashable | None:
        """None if buffers alternate because gradients go to the host: then nothing is captured."""
        pages = [unit.index for unit in units if unit.index in self.lengths]
        if any(page not in self.device.lengths for page in pages):
            return None
        targets = [t for unit in units for t in unit.tensors if t.start in self.targets]
        numbers = tuple(self.targets[tensor.start].identity for tensor in targets)
        received = tuple(tuple(self.current.received[page]) for page in pages)
        return numbers, received, tuple(self.buffer(page).data_ptr() for page in pages)

    def memory(self, units: list[Unit]) -> list[torch.Tensor]:
        return [self.buffer(unit.index) for unit in units if unit.index in self.lengths]

    def mark(self) -> Any:
        return {page: dict(received) for page, received in self.current.received.items()}, dict(self.current.weights)

    def rewind(self, mark: Any) -> None:
        received, weights = mark
        self.current.received.clear()
        self.current.received |= {page: dict(targets) for page, targets in received.items()}
        self.current.weights = dict(weights)

    def replayed(self, offers: list[tuple[FlatTensor, torch.Tensor]]) -> None:
        for tensor, w in offers:
            target = self.targets.get(tensor.start)
            if target is not None:
                self.current.received[target.unit][target.name] = target
                self.current.weights[target.name] = w

    # -- the buffers --------------------------------------------------------------------------------------

    def buffer(self, unit: int) -> torch.Tensor:
        """The buffer in which the unit's gradient is accumulated."""
        waiting = self.device.waiting.get(unit)
        return self.gradients.of(unit) if waiting is None else waiting

    def _sum_of(self, target: Target, w: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The place where the target's gradient is accumulated, and whether it is still empty."""
        received = self.current.received[target.unit]
        first = target.name not in received
        received[target.name] = target
        self.current.weights[target.name] = w
        return view_in(self.buffer(target.unit), target), first

    def _complete(self, unit: Unit) -> tuple[list[Target], list[torch.Tensor]]:
        """The targets of a unit that have a gradient, and their weights."""
        step = self.current
        targets = sorted(step.received.pop(unit.index, {}).values(), key=lambda target: target.begin)
        return targets, [step.weights.pop(target.name) for target in targets]
