"""Names beside a plot stand apart, in their order, and inside."""

from hypothesis import given
from hypothesis import strategies as st

from keyhole.pages.labels import NAME_HEIGHT, apart


@given(st.lists(st.floats(0, 300), min_size=1, max_size=15))
def test_names_stand_apart_inside_the_plot(heights: list[float]) -> None:
    """Whatever they name: never closer than a line of text, never out of the plot, never in another order."""
    placed = apart(sorted(heights), 0.0, 300.0)
    assert all(b - a >= NAME_HEIGHT - 1e-6 for a, b in zip(placed, placed[1:], strict=False))
    assert -1e-6 <= placed[0] and placed[-1] <= 300 + 1e-6
