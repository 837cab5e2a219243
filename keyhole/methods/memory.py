"""Calls the byte formulas of model/ with a workload, for most methods."""

from keyhole.methods.base import Room, Workload
from keyhole.model.backward import memory as backward
from keyhole.model.forward import memory as forward
from keyhole.model.structure.layout import Layout


def forward_bytes(
    layout: Layout, streamed: set[int], work: Workload, room: Room, directions: int = 1
) -> forward.ForwardBytes:
    """Forward passes in lockstep: zeroth-order, evaluation, generation. (Baselines count as if they did this: only
    their weights are planned.)"""
    sizes = {"tokens": work.tokens, "passes": work.passes, "directions": directions}
    return forward.forward_bytes(layout, streamed, formats=room.formats, workspace_bytes=room.workspace_bytes, **sizes)


def reverse_bytes(
    layout: Layout, streamed: set[int], work: Workload, room: Room, updates: int = 0
) -> backward.ReverseBytes:
    """Forward and backward pass, block by block; updates: bytes that the method adds."""
    on_host = work.settings is not None and work.settings.activations == "host"
    sizes = {"tokens": work.tokens, "passes": work.passes, "on_host": on_host, "updates": updates}
    return backward.reverse_bytes(layout, streamed, formats=room.formats, workspace_bytes=room.workspace_bytes, **sizes)
