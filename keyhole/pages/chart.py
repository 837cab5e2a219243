"""Line charts as inline SVG, written as text: no library and no external files are needed.

A series is a curve. It may have a band from minimum to maximum (over seeds, or over the steps of one point), a faint
line of the measured values (the curve is then their running mean), and dots. A series with one x is drawn as a point.
The smoothed value at i is the mean of the points within `reach` of i, fewer at the ends, so the curve neither lags nor
starts from an invented value:

    s_i = mean(y_j : |i - j| <= min(reach, i, n - 1 - i))
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from operator import sub

from keyhole.pages.frame import dot

WIDTH, HEIGHT = 560, 310
LEFT, RIGHT, TOP, BOTTOM = 86, 24, 14, 46
TICK_GAP = 52.0  # minimum distance between the centres of two numbers under the plot


@dataclass(frozen=True)
class Series:
    """A curve of finite numbers: x, y, and the minimum and maximum at each x. faint: the measured values, if y is their
    running mean. dots: marks each point."""

    name: str
    colour: int
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    faint: list[float] = field(default_factory=list)
    dots: bool = False


def smooth(y: list[float], reach: int) -> list[float]:
    """Running mean, narrower near the ends."""
    sums = list(accumulate(y, initial=0.0))
    spans = [min(reach, i, len(y) - 1 - i) for i in range(len(y))]
    return [(sums[i + s + 1] - sums[i - s]) / (2 * s + 1) for i, s in enumerate(spans)]


def noisy(name: str, colour: int, x: Sequence[float], y: Sequence[float | None]) -> Series:
    """A curve of single steps: the measured values faint, the running mean strong. Values that are not finite are left
    out."""
    kept = [(a, b) for a, b in zip(x, y, strict=True) if b is not None and math.isfinite(b)]
    values = [b for _, b in kept]
    return Series(name, colour, [a for a, _ in kept], smooth(values, max(1, len(values) // 30)), faint=values)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`; steps of 1, 2, 2.5 or 5 times a power of ten."""
    rough = max(high - low, 1e-30) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class Axes:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def __init__(self, x: Sequence[float], y: Sequence[float]) -> None:
        self.high_x = max(max(x, default=1.0), 1e-9)
        largest, span = max((abs(value) for value in y), default=1.0), max(y) - min(y) if y else 0.0
        span = span if span > 1e-6 * largest else largest * 0.1 or 1.0  # smaller spans are rounding errors
        self.low_y, self.high_y = min(y, default=0.0) - 0.06 * span, max(y, default=1.0) + 0.06 * span

    def x(self, value: float) -> float:
        return LEFT + value / self.high_x * (self.right - LEFT)

    def y(self, value: float) -> float:
        """Clipped to the plot."""
        value = min(max(value, self.low_y), self.high_y)
        return self.bottom - (value - self.low_y) / (self.high_y - self.low_y) * (self.bottom - TOP)


def chart(series: Sequence[Series], title: str, x_label: str, y_label: str, baseline: float | None = None) -> str:
    """An <svg> element, and the names of its curves. baseline: a dashed line, for the model before training."""
    series = [each for each in series if each.x]
    x = [value for each in series for value in each.x]
    y = [value for each in series for value in (*each.y, *each.low, *each.high)]
    y += [] if baseline is None else [baseline]
    axes = Axes(x, y)
    body = _grid(axes, x_label, y_label)
    if baseline is not None:
        at = f"{axes.y(baseline):.1f}"
        body.append(f'<line class="base" x1="{LEFT}" x2="{axes.right}" y1="{at}" y2="{at}"/>')
    raw = '<polyline class="raw c{}" points="{}"/>'
    body += [
        *(_band(axes, each) for each in series if each.low != each.high),
        *(raw.format(each.colour, _points(axes, each.x, each.faint)) for each in series if len(each.faint) > 1),
        *(_curve(axes, each) for each in series),
    ]
    if baseline is not None:  # after the curves, so that none is drawn through it
        body.append(f'<text class="tick over" x="{LEFT + 4}" y="{axes.y(baseline) - 4:.1f}">before training</text>')
    names = "".join(
        f"<li>{dot(each.colour)}{escape(each.name)}</li>"
        for each in sorted(series, key=lambda each: -each.y[-1])
        if each.name
    )
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    return svg + (f"<ul class='legend'>{names}</ul>" if names else "")


def _grid(axes: Axes, x_label: str, y_label: str) -> list[str]:
    bottom, right, parts = axes.bottom, axes.right, []
    values = ticks(axes.low_y, axes.high_y)
    step, largest = min(map(sub, values[1:], values), default=0.0), max(map(abs, values), default=0.0)
    digits = 4  # at least; as many as distinguish neighbours
    if step > 0 and largest > 0:
        digits = min(8, max(4, 2 + math.ceil(math.log10(largest / step))))
    for value in values:
        y = axes.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.{digits}g}</text>')
    last = -math.inf
    for value in ticks(0.0, axes.high_x):
        if axes.x(value) - last >= TICK_GAP:
            last = axes.x(value)
            parts.append(f'<text class="tick" x="{last:.1f}" y="{bottom + 20}" text-anchor="middle">{value:g}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text class="axis" x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    turned = f"translate(14 {(TOP + bottom) / 2:.1f}) rotate(-90)"
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
    line = f'<polyline class="line c{each.colour}" points="{_points(axes, each.x, each.y)}">{name}</polyline>'
    marks = list(zip(each.x, each.y, strict=True))
    return line + "".join(
        f'<circle class="f{each.colour}" cx="{axes.x(a):.1f}" cy="{axes.y(b):.1f}" r="3"/>'
        for a, b in (marks if each.dots else marks[-1:])
    )
