"""Buffers in which gradients come together: nothing that is still needed is overwritten."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.methods.lsp.sink import GradientBuffers

CPU = torch.device("cpu")


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
