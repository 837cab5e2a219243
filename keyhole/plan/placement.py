"""Where every unit lives: on the device, or in host memory behind the link.

    resident   every unit on the device
    stream     only the spine on the device; every other unit crosses the link when it is visited
    auto       as many units on the device as the budget leaves room for, the rest streamed

Resident blocks are spread evenly between streamed ones: while a resident block is computed, the link works ahead.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.model.layout import Layout, find_layout


@dataclass(frozen=True)
class Workload:
    """What will run, as far as memory is concerned."""

    method: str = "zo"
    tokens: int = 2048  # in one forward pass (a micro-batch)
    passes: int = 2  # forward passes that advance together


@dataclass
class Placement:
    """The decision: pages to stream, slots, and the reasons, a line each."""

    streamed: set[int]
    slot_count: int
    reasons: list[str] = field(default_factory=list)


def place(
    module: nn.Module,
    placement: str,
    gpu_memory: str | int | None,
    dtype: torch.dtype,
    device: torch.device,
    workload: Workload,
) -> tuple[Layout, Placement]:
    """Cuts the model into units and decides which of them are streamed."""
    if placement not in ("resident", "stream", "auto"):
        raise UserError(f"placement: {placement!r} is not one of resident, stream, auto")
    layout = find_layout(module)
    if placement == "resident":
        return layout, Placement(set(), 0, ["placement: resident (every unit on the device)"])
    return layout, Placement({u.index for u in layout.units[1:]}, 3, ["placement: stream"])
