"""Charts: the arithmetic behind them, and what may not break them."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.pages.chart import BOTTOM, TOP, WIDTH, Series, chart, noisy, smooth, ticks
from tests.pages.made import PAGES, Reader

values = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60)


@given(values, st.integers(0, 20))
def test_smoothing_stays_within_and_keeps_ends(y: list[float], reach: int) -> None:
    """A running mean lies between the extremes, leaves both ends where they are, and keeps a straight line."""
    s = smooth(y, reach)
    assert len(s) == len(y)
    assert all(min(y) - 1e-6 <= value <= max(y) + 1e-6 for value in s)
    assert s[0] == pytest.approx(y[0], abs=1e-6) and s[-1] == pytest.approx(y[-1], abs=1e-6)
    line = [y[0] + y[-1] * i for i in range(30)]
    assert smooth(line, reach) == pytest.approx(line, abs=1e-6)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_round(low: float, span: float) -> None:
    """Ticks do not pass the ends, and are evenly spaced by 1, 2, 2.5 or 5 times a power of ten."""
    found = ticks(low, low + span)
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in found) and 2 <= len(found) <= 7
    step = found[1] - found[0]
    lead = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(lead - m) for m in (1, 2, 2.5, 5, 10)) < 1e-2 or abs(low) > 1e6 * span


def points(svg: str) -> list[tuple[float, float]]:
    pairs = " ".join(re.findall(r'points="([^"]*)"', svg)).split()
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in pairs)]


def height_of(svg: str) -> float:
    return float(re.search(r'viewBox="0 0 \d+ (\d+)"', svg)[1])


def test_every_point_is_inside_the_picture() -> None:
    """A spike above the smoothed curve is cut, not drawn outside."""
    y = [1.0] * 50
    y[20] = 100.0
    svg = chart([noisy("a", 0, [float(i) for i in range(50)], y)], "t", "x", "y")
    assert len(points(svg)) == 100
    assert all(0 <= x <= WIDTH and TOP - 0.1 <= y <= height_of(svg) - BOTTOM + 0.1 for x, y in points(svg))


def test_no_curve_is_drawn_through_the_label_of_the_baseline() -> None:
    """It comes after curves and grid, with an outline in the colour of the card."""
    svg = chart([noisy("a", 0, [0.0, 1.0], [0.0, 1.0])], "t", "x", "y", baseline=0.5)
    assert svg.index("before training") > svg.rindex("<polyline") and 'class="tick over"' in svg


def test_non_finite_losses_are_left_out() -> None:
    """A run that blew up still gets a chart."""
    svg = chart([noisy("a", 0, [1.0, 2.0, 3.0, 4.0], [1.0, math.nan, math.inf, 2.0])], "t", "x", "y")
    assert len(points(svg)) == 4 and "nan" not in svg and "inf" not in svg


def test_nothing_to_draw() -> None:
    """No curves, or an empty one, give axes and no error; a name cannot break out of the picture."""
    assert "<svg" in chart([], "t", "x", "y")
    assert "<svg" in chart([noisy("a", 0, [], [])], "t", "x", "y")
    svg = chart([Series("<b>", 0, [1.0], [1.0])], "t", "x & y", "y")
    assert "<b>" not in svg and "x &amp; y" in svg


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_whole(name: str) -> None:
    """Its tags are closed in order, and a browser would fetch and execute nothing."""
    assert {"svg", "table"} <= Reader.of(PAGES[name]()).names


def test_names_are_listed_in_the_order_of_the_curves_ends() -> None:
    lines = [
        Series(name, i, [0.0, 1.0], [1.0, end]) for i, (name, end) in enumerate({"a": 1.0, "b": 3.0, "": 2.0}.items())
    ]
    svg = chart(lines, "t", "x", "y")
    assert re.findall(r"</span>([^<]*)</li>", svg) == ["b", "a"]


def test_a_chart_to_the_pixel() -> None:
    """Bands, dots, single points, faint values, a baseline and all ticks: tests/pages/chart.svg, an element a line."""
    curve = noisy("a", 0, [float(i) for i in range(0, 64, 2)], [2.0 - (i % 7) / 3 - i / 40 for i in range(32)])
    grid = Series("b", 1, [0.0, 25.0, 60.0], [1.0, 0.5, 0.25], [0.9, 0.5, 0.125], [1.25, 0.75, 0.5], dots=True)
    one = Series("c & d", 2, [30.0], [1.5], [1.25], [1.75])
    found = chart([curve, grid, one], "title", "step", "loss", baseline=1.875).replace("><", ">\n<") + "\n"
    assert found == Path(__file__).with_name("chart.svg").read_text()
