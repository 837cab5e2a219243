"""Charts of a comparison as inline SVG: curves with a band over the seeds, and points with bars.

A curve is the mean over seeds at every evaluation; the band reaches from the lowest seed to the highest. The y axis
begins near the lowest value, not at 0: accuracies live between chance and 100. Where the longest curve is LOG_FROM
times the shortest, x is logarithmic, so that a method that is done in seconds is still seen beside one that takes an
hour. Names stand right of the plot, apart from each other (pages/labels.py).

Colours are CSS classes of the page (`c0` strokes, `f0` fills), so a chart follows the light and dark themes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from keyhole.pages.labels import apart

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 54, 116, 14, 44
LOG_FROM = 20.0
MOST_NAME = 16


@dataclass(frozen=True)
class Series:
    """A curve: x, mean, lowest and highest. One x alone is a point with a bar."""

    name: str
    colour: int
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`; steps of 1, 2, 2.5 or 5 times a power of ten."""
    rough = max(high - low, 1e-9) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class Axes:
    """Data to pixels."""

    def __init__(self, x: Sequence[float], y: Sequence[float], log: bool, from_zero: bool) -> None:
        self.log = log
        self.low_x = (min(x) if log else 0.0 if from_zero else min(x)) if x else 0.0
        self.high_x = max(max(x, default=1.0), self.low_x * 1.001, 1e-9)
        span = (max(y) - min(y) if y else 0.0) or max(1.0, abs(max(y, default=1.0)) * 0.1)
        self.low_y, self.high_y = min(y, default=0.0) - 0.06 * span, max(y, default=1.0) + 0.06 * span

    def x(self, value: float) -> float:
        low, high = self.low_x, self.high_x
        if self.log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return LEFT + (value - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low_y) / (self.high_y - self.low_y) * (HEIGHT - TOP - BOTTOM)

    def x_ticks(self) -> list[float]:
        if not self.log:
            return ticks(self.low_x, self.high_x)
        first, last = math.floor(math.log10(self.low_x)), math.ceil(math.log10(self.high_x))
        return [v for e in range(first, last + 1) for m in (1, 3) if self.low_x <= (v := m * 10.0**e) <= self.high_x]


def chart(series: Sequence[Series], title: str, x_label: str, y_label: str, baseline: float | None = None) -> str:
    """An <svg> element. baseline: a dashed line, for the model before training."""
    series = [each for each in map(_finite, series) if each.x]
    x = [value for each in series for value in each.x]
    y = [value for each in series for value in (*each.low, *each.high)]
    y += [baseline] if baseline is not None and math.isfinite(baseline) else []
    ends = [each.x[-1] for each in series]
    curves = any(len(each.x) > 1 for each in series)
    log = curves and min(x, default=0.0) > 0 and max(ends) / min(ends) >= LOG_FROM
    axes = Axes(x, y, log, from_zero=True)
    body = _grid(axes, x_label, y_label)
    if baseline is not None and math.isfinite(baseline):
        height = axes.y(baseline)
        body.append(f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        body.append(f'<text class="tick" x="{LEFT + 4}" y="{height - 4:.1f}">before training</text>')
    body += [_band(axes, each) for each in series if each.low != each.high]
    body += [_curve(axes, each) for each in series]
    body += _names(axes, series)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'


def _finite(each: Series) -> Series:
    rows = zip(each.x, each.y, each.low, each.high, strict=True)
    kept = [row for row in rows if all(map(math.isfinite, row))]
    return Series(each.name, each.colour, *([row[i] for row in kept] for i in range(4)))


def _grid(axes: Axes, x_label: str, y_label: str) -> list[str]:
    bottom, right, parts = HEIGHT - BOTTOM, WIDTH - RIGHT, []
    for value in ticks(axes.low_y, axes.high_y):
        y = axes.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in axes.x_ticks():
        x = f"{axes.x(value):.1f}"
        parts.append(f'<text class="tick" x="{x}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    turned = f"translate(13 {(TOP + bottom) / 2}) rotate(-90)"
    parts.append(f'<text class="axis" transform="{turned}" text-anchor="middle">{escape(y_label)}</text>')
    return parts


def _points(axes: Axes, x: Sequence[float], y: Sequence[float]) -> str:
    return " ".join(f"{axes.x(a):.1f},{axes.y(b):.1f}" for a, b in zip(x, y, strict=True))


def _band(axes: Axes, each: Series) -> str:
    if len(each.x) == 1:
        x, low, high = axes.x(each.x[0]), axes.y(each.low[0]), axes.y(each.high[0])
        return f'<line class="line c{each.colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
    there, back = _points(axes, each.x, each.high), _points(axes, each.x[::-1], each.low[::-1])
    return f'<polygon class="band f{each.colour}" points="{there} {back}"/>'


def _curve(axes: Axes, each: Series) -> str:
    name = f"<title>{escape(each.name)}</title>"
    if len(each.x) == 1:
        x, y = axes.x(each.x[0]), axes.y(each.y[0])
        return f'<circle class="f{each.colour}" cx="{x:.1f}" cy="{y:.1f}" r="5">{name}</circle>'
    return f'<polyline class="line c{each.colour}" points="{_points(axes, each.x, each.y)}">{name}</polyline>'


def _names(axes: Axes, series: Sequence[Series]) -> list[str]:
    """A dot at the end of each curve, and the names in a column, in the order of their ends."""
    drawn = sorted(series, key=lambda each: -each.y[-1])
    heights = apart([axes.y(each.y[-1]) for each in drawn], TOP + 4, HEIGHT - BOTTOM)
    parts = []
    for each, height in zip(drawn, heights, strict=True):
        x, y = axes.x(each.x[-1]), axes.y(each.y[-1])
        parts.append(f'<circle class="f{each.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
        name = each.name if len(each.name) <= MOST_NAME else f"{each.name[: MOST_NAME - 1]}…"
        place = f'x="{WIDTH - RIGHT + 10}" y="{height + 4:.1f}"'
        parts.append(f'<text class="name f{each.colour}" {place}>{escape(name)}</text>')
    return parts
