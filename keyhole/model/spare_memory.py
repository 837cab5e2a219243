"""Device memory for what makes steps faster and need not be: CUDA graphs, buffers, activations that graphs keep.

    without a budget    what is free on the device
    with a budget       budget - max(reserved, planned + held), at most what is free

planned: the largest step of the plan. It runs without any of this, and may still come: a longer batch, another shape.
Steps that the plan does not cover (another method, a batch longer than planned) may need the rest of the budget, so
from then on there is nothing to spare (`covers`).
held: what recordings keep for good beside it, which the plan does not count. reserved: by PyTorch's allocator, all of
this included.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.machine.settings import memory_limit


class Placed(Protocol):
    """The plan by which a model was placed (plan/placement.py)."""

    reasons: list[str]
    device_bytes: Any  # and work: of keyhole.plan, a later layer
    budget_bytes: int | None
    limit_bytes: int | None
    pass_tokens: int | None
    parks: bool
    workspace_bytes: int
    work: Any
    adapter: Any
    is_for_another_method: bool

    @property
    def input_bytes(self) -> int | None:
        """Room on the device for inputs of blocks between forward and backward pass."""

    def evaluation_passes(self, layout: Any, most: int) -> int:
        """How many batches of the planned size may go through the model together."""

    def check_method(self, method: str) -> None:
        """Refuses a method that cannot train this model; warns if the plan was made for another one."""

    def check_step(self, method: str, settings: Any, shapes: Sequence[Sequence[int]]) -> None:
        """Warns once of a step that is larger than the plan was made for."""

    @property
    def compared(self) -> str:
        """The last step beside the planned one."""


def left_of(placed: Placed | None, free_bytes: int, reserved_bytes: int, held_bytes: int = 0) -> int:
    """Bytes that optional memory may take."""
    if placed is None or placed.budget_bytes is None:
        return free_bytes
    beside = max(reserved_bytes, placed.device_bytes.total + held_bytes)
    return min(free_bytes, placed.budget_bytes - beside)


class SpareMemory:
    """Counts what is held of it, by kind."""

    def __init__(self, placed: Placed | None, device: torch.device) -> None:
        self.placed, self.device = placed, device
        self.held: Counter[str] = Counter()
        self.asked_bytes = 0.0  # the most that was asked for at once

    @property
    def budget_bytes(self) -> int | None:
        return None if self.placed is None else self.placed.budget_bytes

    @property
    def reserved_bytes(self) -> int:
        """By the allocator for this model: without what others hold, and the budgets of other models."""
        of_others = 0 if self.budget_bytes is None else memory_limit(self.device).taken_bytes - self.budget_bytes
        return max(0, int(accelerator.memory_reserved(self.device)) - max(0, of_others))

    @property
    def workspace_bytes(self) -> int:
        """What cuBLAS takes for the stream on which graphs are captured."""
        return 0 if self.placed is None else self.placed.workspace_bytes

    @property
    def is_spent(self) -> bool:
        """Whether the budget has no room for more than is held beside the planned step."""
        placed = self.placed
        if placed is None or placed.budget_bytes is None:
            return False
        return bool(placed.budget_bytes < placed.device_bytes.total + self.held.total())

    def covers(self, tokens: Sequence[int] = ()) -> bool:
        """Whether the budget, if there is one, was planned for this method, and for passes over so many tokens."""
        placed = self.placed
        if placed is None or placed.budget_bytes is None:
            return True
        work = placed.work
        return not placed.is_for_another_method and (
            sum(tokens) <= work.passes * work.tokens and max(tokens, default=0) <= work.tokens
        )

    def left(self) -> int:
        """Bytes that are left now."""
        if self.device.type != ACCELERATOR:
            return 0
        free_bytes, _ = accelerator.mem_get_info(self.device)
        return left_of(self.placed, free_bytes, self.reserved_bytes, self.held.total())

    def has(self, needed_bytes: float) -> bool:
        """Whether so many bytes are left, if need be after the allocator has given back what it does not use."""
        self.asked_bytes = max(self.asked_bytes, needed_bytes)
        if self.left() >= needed_bytes:
            return True
        if self.budget_bytes is None or self.device.type != ACCELERATOR:
            return False
        accelerator.empty_cache()
        return self.left() >= needed_bytes

    @contextmanager
    def holding(self, kind: str) -> Iterator[None]:
        """A context for a capture: what the pools of graphs grow by is held. In a capture the allocator gives nothing
        back, so with a budget it does before."""
        if self.device.type != ACCELERATOR:
            yield
            return
        budget = self.budget_bytes
        if budget is not None and self.reserved_bytes + self.asked_bytes > budget:
            accelerator.empty_cache()
        before = accelerator.memory_reserved(self.device)
        try:
            yield
        finally:
            self.held[kind] += max(0, accelerator.memory_reserved(self.device) - before)
