"""Units that stay on the device are spread evenly between those that are streamed."""

from hypothesis import given
from hypothesis import strategies as st

from keyhole.plan.fit import _spread


def units_of(numels: list[int]) -> list[tuple[int, set[int]]]:
    return [(numel, {i}) for i, numel in enumerate(numels)]


@given(st.lists(st.integers(1, 1000), min_size=1), st.floats(0, 1))
def test_resident_units_are_spread_evenly(numels: list[int], share: float) -> None:
    """Up to any unit, what stays differs from its share by no more than half of the largest unit."""
    taken = _spread(units_of(numels), share)
    kept = whole = 0
    for i, numel in enumerate(numels):
        kept, whole = kept + (numel if i in taken else 0), whole + numel
        assert abs(kept - share * whole) <= max(numels) / 2 + 1e-6


@given(st.lists(st.integers(1, 1000), min_size=1))
def test_nothing_and_everything(numels: list[int]) -> None:
    """A share of 0 keeps no unit, a share of 1 all of them."""
    assert _spread(units_of(numels), 0.0) == set() and _spread(units_of(numels), 1.0) == set(range(len(numels)))
