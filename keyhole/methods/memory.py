"""Calls the byte formulas of model/ with a workload, for most methods."""

from keyhole.methods.workload import Room, Workload
from keyhole.model.backward import memory as backward
from keyhole.model.forward import memory as forward
from keyhole.model.structure.layout import Layout

# What a compiled block keeps, of what autograd saves: the compiler recomputes elementwise operations. Llama-7B, 4,096
# tokens: 16.0 of 23.1 GiB (`keyhole bench lomo --only kept`, one H200)
COMPILED = 0.7


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
    own = work.settings
    how, compiled = (None, False) if own is None else (own.keeps, own.is_compiled)
    keeps = (COMPILED if compiled else 1.0) if how == "none" else 0.0
    return backward.reverse_bytes(
        layout,
        streamed,
        tokens=work.tokens,
        passes=work.passes,
        on_host=how == "host",
        keeps=keeps,
        compiled=compiled,
        updates=updates,
        formats=room.formats,
        workspace_bytes=room.workspace_bytes,
    )
