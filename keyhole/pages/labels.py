"""Positions of names beside a plot: in one column, in the order of their curves, without overlaps."""

NAME_HEIGHT = 19.0  # height of a line of text (style.py)


def apart(heights: list[float], top: float, bottom: float, gap: float = NAME_HEIGHT) -> list[float]:
    """Sorted heights, moved as little as needed to be `gap` apart (less if they would not fit)."""
    gap = min(gap, (bottom - top) / max(1, len(heights) - 1))
    placed: list[float] = []
    for y in heights:
        placed.append(max(y, placed[-1] + gap if placed else top))
    lowest = bottom
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], lowest)
        lowest = placed[i] - gap
    return placed
