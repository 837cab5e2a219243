"""The cost of a step of LOMO and of the rules built on it. (Bytes on the device: methods/work.py.)

touched     the product writes the gradient of a matrix; the update reads it, and reads and writes the weight: 2 b + 2 w
            per parameter, for b bytes of compute and w at home. apollo-mini reads the gradient once more for its
            sketch, and the weight for its norm: b + w. adalomo sums over rows and columns (ops/adalomo.py): g
            and w, then g again, 2 b + w. These kernels reach about a SUMS-th of the rate of copies: its update took
            0.03 to 0.04 s more than LOMO's for Llama-7B on an H200 (lomo_h200_2026-11-15_a and _f in
            benchmarks/records/), where the bytes alone take 0.01; since it sums over whole tables, 0.056 for a 3.5B
            (plan_check_h200_2026-11-16) and 0.06 to 0.09 for a 7B (lomo_h200_2026-11-16). Kahan rounding reads and
            writes 2 bytes more.
launches    an update per tensor; SUMMED: with the sums of adalomo; SKETCHED: with norms and moments of apollo-mini
products    two backward passes if the norm of the whole gradient clips, or float16 scales the loss
down        every streamed unit, once; of expert units, those that received tokens
"""

import torch

from keyhole.machine.rates import Rates
from keyhole.methods.lomo.traits import ADALOMO, LOMO, LOMO_LORA, LOMOConfig, LOMOLoRAConfig, LOMOSettings
from keyhole.methods.lora.memory import adapted_sides, adapter_launches
from keyhole.methods.work import UPDATE, met_bytes, reverse_bytes, reverse_work, trained_numel, update_launches
from keyhole.methods.workload import Formulas, Room, StepWork, Workload
from keyhole.model.backward.memory import ReverseBytes
from keyhole.model.structure.layout import Layout

SUMS = 7
SUMMED, SKETCHED = 17, 38  # launches of an update
ADAPTER_ELEMENTS = 2  # that an adapter reads and writes per input and output of its layer, per pass, in 16 bit


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """The FLOPs, bytes and launches of a step."""
    own = work.settings or (LOMOLoRAConfig if work.method == LOMO_LORA.name else LOMOConfig)()
    assert isinstance(own, LOMOSettings)
    reverses = 2 if work.clips or room.formats.dtype == torch.float16 else 1
    found = reverse_work(layout, streamed, work, room, rates, reverses=reverses)
    numel, b, w = trained_numel(layout), room.formats.dtype.itemsize, room.formats.plain.itemsize
    per_weight = 2 * b + 2 * w + (4 if own.rounding == "kahan" else 0)
    if work.method == ADALOMO.name:
        per_weight += SUMS * (2 * b + w)
    sketches = work.method not in (ADALOMO.name, LOMO.name, LOMO_LORA.name)
    per_weight += b + w if sketches else 0
    if not found.recorded:
        each = SUMMED if work.method == ADALOMO.name else SKETCHED if sketches else UPDATE
        found = found.plus(launches=update_launches(layout, each))
    kahan = 2 * numel if own.rounding == "kahan" else 0
    found = found.plus(touched=per_weight * numel, down=met_bytes(layout, streamed, work, room), saved_bytes=kahan)
    if isinstance(own, LOMOLoRAConfig):
        sides = sum(sum(t.shape) for u in layout.of_kind("block") for t in u.tensors if len(t.shape) == 2)
        found = found.plus(touched=8.0 * work.passes * ADAPTER_ELEMENTS * work.tokens * sides)
        if not found.recorded:
            found = found.plus(launches=adapter_launches(layout, own.target_modules, found.forwards, work.passes))
    return found


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> ReverseBytes:
    """The device peak of a step of lomo-lora: with fp32 weight, gradient and two moments of every adapter."""
    own = work.settings or LOMOLoRAConfig()
    assert isinstance(own, LOMOLoRAConfig)
    return reverse_bytes(layout, streamed, work, room, updates=16 * own.r * adapted_sides(layout, own.target_modules))


LOMO_FORMULAS, LOMO_LORA_FORMULAS = Formulas(reverse_bytes, step_work), Formulas(device_bytes, step_work)
