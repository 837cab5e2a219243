"""Optional memory never takes what a budget needs for the largest planned step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.model.spare_memory import SpareMemory, left_of

BYTES = st.integers(0, 100)


def placed(budget: int | None, planned: int) -> Any:
    work = SimpleNamespace(tokens=16, passes=2)
    of_step = SimpleNamespace(total=planned)
    return SimpleNamespace(
        budget_bytes=budget, device_bytes=of_step, workspace_bytes=0, work=work, is_for_another_method=False
    )


@given(BYTES, BYTES, BYTES, BYTES)
def test_without_a_budget_what_is_free_is_left(free: int, reserved: int, planned: int, held: int) -> None:
    assert left_of(None, free, reserved, held) == left_of(placed(None, planned), free, reserved, held) == free


@given(st.integers(0, 100), BYTES, BYTES, st.lists(st.tuples(BYTES, BYTES), max_size=6))
def test_recordings_leave_room_for_the_planned_step(
    free: int, budget: int, planned: int, asked: list[tuple[int, int]]
) -> None:
    held = 0
    for takes, cached in asked:
        reserved = held + cached
        left = left_of(placed(budget, planned), free, reserved, held)
        if takes <= left:
            held += takes
            assert takes <= free and held + planned <= budget and held + cached <= budget


def test_what_pools_grow_by_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a capture that fails; and memory that the allocator gives back is left again."""
    reserved = [30]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reserved.__setitem__(0, 30))
    spare = SpareMemory(placed(100, 40), torch.device("cuda"))
    assert spare.left() == 60
    with pytest.raises(RuntimeError), spare.holding("graphs"):
        reserved[0] = 45
        raise RuntimeError("operation not permitted when stream is capturing")
    assert spare.held.total() == 15 and spare.left() == 45
    reserved[0] = 90
    assert spare.left() == 10 and spare.has(45) and not spare.has(46)


def test_a_plan_covers_steps_of_its_size_and_method() -> None:
    """Others may need the rest of the budget. Without a budget there is no plan to keep to."""
    for budget in (None, 100):
        spare = SpareMemory(placed(budget, 40), torch.device("cpu"))
        assert spare.covers() and spare.covers([16, 9])
        assert spare.covers([8, 8, 8, 8])  # in more passes, but no more in all
        found = [spare.covers([17]), spare.covers([16, 16, 1])]
        spare.placed.is_for_another_method = True  # type: ignore[union-attr]
        assert [*found, spare.covers()] == [budget is None] * 3


def test_a_budget_is_spent_when_more_is_held_than_the_planned_step_leaves() -> None:
    spare, free = (SpareMemory(placed(budget, 40), torch.device("cpu")) for budget in (100, None))
    spare.held["graphs"] = free.held["graphs"] = 60
    assert not spare.is_spent
    spare.held["static memory"] = free.held["static memory"] = 1
    assert spare.is_spent and not free.is_spent
