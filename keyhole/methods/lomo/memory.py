"""The cost of a step of LOMO and of the rules built on it. (Bytes on the device: methods/memory.py.)

touched     the product writes the gradient of a matrix; the update reads it, and reads and writes the weight: 2 b + 2 w
            per parameter, for b bytes of compute and w at home. A rule with a moment per row and column (adalomo,
            apollo-mini) reads the gradient once more for its sums, and the weight for its norm: b + w. Kahan rounding
            reads and writes 2 bytes more.
products    two backward passes if the norm of the whole gradient clips, or float16 scales the loss
down        every streamed unit, once; of expert units, those that received tokens
"""

import torch

from keyhole.machine.rates import Rates
from keyhole.methods.base import Room, Workload
from keyhole.methods.lomo.traits import LOMO, LOMO_LORA, LOMOConfig
from keyhole.methods.work import StepWork, met_bytes, reverse_work, trained_numel
from keyhole.model.structure.layout import Layout

ADAPTER_ELEMENTS = 2  # that an adapter reads and writes per input and output of its layer, per pass, in 16 bit


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """The FLOPs, bytes and launches of a step."""
    own: LOMOConfig = work.settings or LOMOConfig()
    reverses = 2 if work.clips or room.formats.dtype == torch.float16 else 1
    found = reverse_work(layout, streamed, work, room, rates, reverses=reverses)
    numel, b, w = trained_numel(layout), room.formats.dtype.itemsize, room.formats.plain.itemsize
    per_weight = 2 * b + 2 * w + (4 if own.rounding == "kahan" else 0)
    per_weight += 0 if work.method in (LOMO.name, LOMO_LORA.name) else b + w
    kahan = 2 * numel if own.rounding == "kahan" else 0
    found = found.plus(touched=per_weight * numel, down=met_bytes(layout, streamed, work, room), saved_bytes=kahan)
    if work.method == LOMO_LORA.name:
        found = found.plus(touched=4 * work.passes * adapter_bytes(layout, work.tokens))
    return found


def adapter_bytes(layout: Layout, tokens: int) -> float:
    """Bytes of the elementwise kernels of adapters beside all linear layers of the blocks, per forward pass."""
    sides = sum(sum(t.shape) for u in layout.of_kind("block") for t in u.tensors if len(t.shape) == 2)
    return 2.0 * ADAPTER_ELEMENTS * tokens * sides
