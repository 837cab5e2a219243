"""Buffers in which gradients come together: nothing that is still needed is overwritten."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.methods.lsp.gather import Gather

CPU = torch.device("cpu")


def test_units_of_a_block_lie_side_by_side() -> None:
    """And share one buffer, as long as the longest group."""
    gather = Gather({0: 64, 1: 128, 2: 256}, {0: "a", 1: "a", 2: "b"}, CPU, count=1)
    gather.of(0).fill_(1.0)
    gather.of(1).fill_(2.0)
    assert gather.numel == 256 and bool((gather.of(0) == 1).all()) and bool((gather.of(1) == 2).all())
    gather.done(0)
    gather.done(1)
    assert gather.of(2).numel() == 256 and len(gather.open) == 1 and not gather.free


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_what_is_open_keeps_its_numbers(work: list[tuple[int, bool]]) -> None:
    """Whatever the order in which units of three groups are asked for and done."""
    gather = Gather(dict.fromkeys(range(6), 64), {unit: unit // 2 for unit in range(6)}, CPU, count=1)
    expected: dict[int, float] = {}
    for turn, (unit, ends) in enumerate(work):
        if unit not in expected:
            gather.of(unit).fill_(float(turn))
            expected[unit] = float(turn)
        elif ends:
            gather.done(unit)
            del expected[unit]
        assert all(bool((gather.of(one) == value).all()) for one, value in expected.items())
    assert len(gather.free) + len(gather.open) <= 3
