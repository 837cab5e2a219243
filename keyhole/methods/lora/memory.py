"""Bytes and work of LoRA, from shapes alone.

For n = sum over adapted matrices of r (rows + columns) numbers in all adapters, and the parts of a sweep
(model/backward/memory.py):

    on the device    homes, slots, block inputs and the activations of one block, as for any backward pass; no gradient
                     of a matrix; 16 n for the adapters: fp32 weight, gradient, two moments
    products         a forward pass, a recomputation (unless activations are kept), the gradient of the inputs: 6 N M
                     for N parameters and M tokens; none for gradients of matrices
    touched          beside an adapted layer, per token: I + 2 O in a forward pass (reads x, adds to y), 3 I + 2 O in
                     the backward pass (adapted_linear.py); here (I + O) times FORWARD and REVERSE
                     packed weights are read, and written unpacked, twice
    up, down         every streamed unit twice; nothing
    saved            12 n: adapters and moments
"""

from dataclasses import replace

import torch

from keyhole.machine.rates import Rates
from keyhole.methods.lora.traits import LoRAConfig
from keyhole.methods.work import reverse_bytes, reverse_work
from keyhole.methods.workload import Formulas, Room, StepWork, Workload
from keyhole.model.backward.memory import ReverseBytes
from keyhole.model.structure.layout import Layout
from keyhole.model.structure.reach import is_left_out

FORWARD, REVERSE = 1.5, 2.5  # elements that an adapter reads and writes per input and output of its layer


def _adapted(layout: Layout, targets: str | list[str] | None) -> list[torch.Size]:
    names = [targets] if isinstance(targets, str) else targets
    return [
        t.shape
        for u in layout.of_kind("block")
        for t in u.tensors
        if len(t.shape) == 2
        and not is_left_out(t.param)
        and (names is None or any(f".{name}." in f".{t.name}" for name in names))
    ]


def adapted_sides(layout: Layout, targets: str | list[str] | None = None) -> int:
    """Inputs and outputs of all linear layers of the blocks, or of those with these names, that are not left out."""
    return sum(sum(shape) for shape in _adapted(layout, targets))


def adapter_launches(layout: Layout, targets: str | list[str] | None, forwards: float, passes: int) -> float:
    """Launches of a step for the adapted layers: in `forwards` forward passes and a backward pass of each micro-batch,
    and in their update."""
    return (passes * (forwards * 7 + 18) + 1.3) * len(_adapted(layout, targets))


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> ReverseBytes:
    """The device peak of a step."""
    own = work.settings or LoRAConfig()
    assert isinstance(own, LoRAConfig)
    numbers = own.r * adapted_sides(layout, own.target_modules)
    return replace(reverse_bytes(layout, streamed, work, room, updates=16 * numbers), gradients=0)


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """The FLOPs, bytes and launches of a step."""
    own = work.settings or LoRAConfig()
    assert isinstance(own, LoRAConfig)
    sides = adapted_sides(layout, own.target_modules)
    numbers = own.r * sides
    found = reverse_work(layout, streamed, work, room, rates, weight_products=0.0, trains=False)
    if not found.recorded:
        found = found.plus(launches=adapter_launches(layout, own.target_modules, found.forwards, work.passes))
    b, blocks = room.formats.dtype.itemsize, layout.of_kind("block")
    unpacked = 2 * sum(room.formats.home_bytes(u) + b * u.numel for u in blocks) if room.formats.packs else 0
    elements = (1 if own.activations == "none" else 2) * FORWARD + REVERSE
    beside = room.formats.dtype.itemsize * work.passes * elements * work.tokens * sides
    return found.plus(touched=beside + unpacked + 32 * numbers, saved_bytes=12 * numbers)


FORMULAS = Formulas(device_bytes, step_work)
