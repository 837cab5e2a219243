"""Calls the byte formulas of model/ with a workload, for most methods; refuses states that host memory cannot hold."""

from keyhole.errors import UserError
from keyhole.machine.host import host_memory, host_sum
from keyhole.machine.sizes import GIB
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


SLACK_BYTES = GIB  # host memory for Python, PyTorch and the CUDA driver


def check_host_memory(keeps: str, state_bytes: int, weights_bytes: int | None = None, ranks: int = 1) -> None:
    """UserError with the missing amount if state and weights do not fit. keeps: the state, in words; weights_bytes: of
    all ranks on this machine (None: they are loaded already); ranks: those that each take so much for the state."""
    needed = ranks * state_bytes + (weights_bytes or 0)
    slack, available = 0 if weights_bytes is None else ranks * SLACK_BYTES, host_memory().available_bytes
    if needed + slack > available:
        raise UserError(
            f"method: {keeps} in host memory: {host_sum(needed, slack, available)}. Free memory, or use method=lomo, "
            "adalomo or zo, which keep no such state."
        )
