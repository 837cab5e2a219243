"""Buffers in which gradients come together: nothing that is still needed is overwritten."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.methods.lsp.sink import GradientBuffers

CPU = torch.device("cpu")


def test_units_of_a_block_lie_side_by_side() -> None:
    """And share one buffer, as long as the longest group."""
    buffers = GradientBuffers({0: 64, 1: 128, 2: 256}, {0: "a", 1: "a", 2: "b"}, CPU, count=1)
    buffers.of(0).fill_(1.0)
    buffers.of(1).fill_(2.0)
    assert buffers.numel == 256 and bool((buffers.of(0) == 1).all()) and bool((buffers.of(1) == 2).all())
    buffers.done(0)
    buffers.done(1)
    assert buffers.of(2).numel() == 256 and len(buffers.open) == 1 and not buffers.free


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_what_is_open_keeps_its_numbers(work: list[tuple[int, bool]]) -> None:
    """Whatever the order in which units of three groups are asked for and done."""
    buffers = GradientBuffers(dict.fromkeys(range(6), 64), {unit: unit // 2 for unit in range(6)}, CPU, count=1)
    expected: dict[int, float] = {}
    for turn, (unit, ends) in enumerate(work):
        if unit not in expected:
            buffers.of(unit).fill_(float(turn))
            expected[unit] = float(turn)
        elif ends:
            buffers.done(unit)
            del expected[unit]
        assert all(bool((buffers.of(one) == value).all()) for one, value in expected.items())
    assert len(buffers.free) + len(buffers.open) <= 3
