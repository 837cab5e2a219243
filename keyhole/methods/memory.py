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


def check_host_memory(
    keeps: str,
    state_bytes: int,
    layout: Layout,
    streamed: set[int],
    element_bytes: int,
    loaded: bool = False,
    cut: dict[int, tuple[int, int]] | None = None,
    ranks: int = 1,
) -> None:
    """UserError with the missing amount if weights and state do not fit. keeps: the state, in words; loaded: weights
    are loaded already; cut: of sharded units, the first element and the number of elements of this rank; ranks: the
    number of processes on this machine that each take this much memory."""
    here = cut or {}
    weights = element_bytes * sum(here.get(u.index, (0, u.numel))[1] for u in layout.units if u.index in streamed)
    needed, slack = ranks * (state_bytes + (0 if loaded else weights)), 0 if loaded else ranks * SLACK_BYTES
    available = host_memory().available_bytes
    if needed + slack > available:
        raise UserError(
            f"method: {keeps} in host memory: {host_sum(needed, slack, available)}. Free memory, or use method=lomo, "
            "adalomo or zo, which keep no such state."
        )
