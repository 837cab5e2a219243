"""The sink of LSP's reverse sweep: sums the compressed gradients of each unit, until they are complete.

    linear      a product dy^T x of a linear layer: compressed to d x d numbers, and added to S
    gradient    a gradient that is no such product, or was not offered: the same

Each target has its place in the buffer of its unit. The step remembers which targets have
received something, and the weights that they belong to. `linear` is one kernel at fixed addresses, so it may be
captured together with the backward pass of a block (`RecordableSink`, model/backward/sink.py), unless gradients of the
block go to the host: then buffers alternate. What happens to complete gradients is in update.py.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from keyhole.machine.gpu import accelerator
from keyhole.methods.lsp.adam import DeviceAdam
from keyhole.methods.lsp.target import Target, Targets
from keyhole.methods.step_numbers import Flags
from keyhole.model.backward.sink import RecordableSink
from keyhole.model.structure.layout import FlatTensor, Unit


@dataclass
class LSPStep:
    """Data shared by the units of one step."""

    number: int = 0
    lr: float = 0.0
    norms: dict[int, torch.Tensor] = field(default_factory=dict)  # of targets, by the first element
    host_norms: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """On the host: norms by the first unit sent, and at the end that of all."""
    submitted: int = 0  # number of jobs submitted to the worker
    outcomes: list[bool] = field(default_factory=list)  # from the worker: whether the units of a job were updated
    skips: list[torch.Tensor] = field(default_factory=list)  # of units on the device: 1.0 means not updated
    report: Flags | None = None  # `skips`, on their way to the host

    def norm(self) -> torch.Tensor | None:
        """The norm of all that the optimizer sees: over targets in the order of the model, however it is cut."""
        norms = [self.norms[start] for start in sorted(self.norms)]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None

    def is_known(self) -> bool:
        """Whether it is known of all units if they were updated."""
        return len(self.outcomes) == self.submitted and (self.report is None or self.report.arrived)

    def is_mixed(self) -> bool:
        """Whether some units were updated and some were not. Waits for the device."""
        skipped = [] if self.report is None else self.report.read()
        return len({*self.outcomes, *(not skip for skip in skipped)}) == 2


@dataclass
class _Buffer:
    flat: torch.Tensor
    read: accelerator.Event | None = None  # after the last read on another stream
    units: set[int] = field(default_factory=set)  # units in this buffer that are not done


class GradientBuffers:
    """Device buffers in which gradients are accumulated, a few, allocated once; one per group of units at a time.

    `of(unit)` is the unit's buffer, the same until `done(*units)`: their last reader has been enqueued (on `stream`,
    else on the compute stream). groups: unit -> its group. The units of a block are placed side by side in one buffer,
    because the backward pass hands over the gradients of a whole block in any order before it finishes a unit. One
    buffer is enough if the kernels that fill it also consume it. If gradients are copied to the host, there are two,
    and the kernels wait on the device for the copy of the group before the last. (A block that is used again later in
    the backward pass keeps its buffer until then, and another one is allocated.)"""

    def __init__(self, lengths: dict[int, int], groups: dict[int, Hashable], device: torch.device, count: int) -> None:
        self.lengths, self.groups, self.device = lengths, groups, device
        self.begins: dict[int, int] = {}
        sizes: dict[Hashable, int] = {}
        for unit, numel in lengths.items():
            self.begins[unit] = sizes.get(groups[unit], 0)
            sizes[groups[unit]] = self.begins[unit] + numel
        self.numel = max(sizes.values(), default=0)
        self.free = deque(_Buffer(torch.empty(self.numel, device=device)) for _ in range(count))
        self.open: dict[Hashable, _Buffer] = {}

    def of(self, unit: int) -> torch.Tensor:
        """The buffer in which the unit's gradient is accumulated."""
        group = self.groups[unit]
        if group not in self.open:
            self.open[group] = self._take()
        buffer = self.open[group]
        buffer.units.add(unit)
        return buffer.flat[self.begins[unit] : self.begins[unit] + self.lengths[unit]]

    def _take(self) -> _Buffer:
        if not self.free:
            return _Buffer(torch.empty(self.numel, device=self.device))
        buffer = self.free.popleft()
        if buffer.read is not None:
            accelerator.current_stream(self.device).wait_event(buffer.read)
            buffer.read = None
        return buffer

    def done(self, *units: int, stream: accelerator.Stream | None = None) -> None:
        """Gradients of these units, of one group, will have been used when the stream reaches this point."""
        group = self.groups[units[0]]
        buffer = self.open[group]
        buffer.units.difference_update(units)
        if stream is not None:
            buffer.read = accelerator.Event()
            buffer.read.record(stream)
        if not buffer.units:
            self.free.append(self.open.pop(group))


class GradientSink(RecordableSink):
    """Receives the gradients of all targets. lengths: numbers of each unit's buffer; device: has the moments of the
    units whose gradients stay on the device."""

    accumulates = by_factors = True  # S sums every product of a linear layer

    def __init__(self, units: Targets, lengths: dict[int, int], gradients: GradientBuffers, device: DeviceAdam) -> None:
        super().__init__()
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
        received = tuple(tensor.name for tensor in targets if tensor.name in self.received)
        return numbers, received, tuple(self.buffer(page).data_ptr() for page in pages)

    def memory(self, units: list[Unit]) -> list[torch.Tensor]:
        return [self.buffer(unit.index) for unit in units if unit.index in self.lengths]

    # -- the buffers --------------------------------------------------------------------------------------

    def buffer(self, unit: int) -> torch.Tensor:
        """The buffer in which the unit's gradient is accumulated."""
        waiting = self.device.waiting.get(unit)
        return self.gradients.of(unit) if waiting is None else waiting

    def _sum_of(self, target: Target, w: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The place where the target's gradient is accumulated, and whether it is still empty."""
        first = target.name not in self.received
        self.received[target.name] = (target.tensor, w)
        return target.view_in(self.buffer(target.unit)), first
