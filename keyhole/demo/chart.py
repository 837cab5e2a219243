"""Line charts as inline SVG: text in, text out, nothing to install and nothing to load from elsewhere.

A line is drawn twice: as measured, faint, and smoothed by a running mean, strong. The smoothed value at i is the mean
of the points within `reach` of i, fewer at the ends, so the curve neither lags nor starts from a made-up value:

    s_i = mean(y_j : |i - j| <= min(reach, i, n - 1 - i))

Curves may end anywhere, and many at the same height; so their names stand in a column right of the plot, in the order
of their ends, each as near to its end as the others allow, and a dot marks where a curve ends.

Colours are CSS classes (`c0`, `c1`, ...) that the page defines, so that a chart follows its light and dark themes.
"""

import math
from dataclasses import dataclass
from html import escape

from keyhole.pages.labels import apart

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 58, 104, 14, 42


@dataclass(frozen=True)
class Line:
    """A named curve; `colour` is the number of its CSS class."""

    name: str
    colour: int
    x: list[float]
    y: list[float]


def smooth(y: list[float], reach: int) -> list[float]:
    """Running mean, narrower near the ends."""
    sums = [0.0]
    for value in y:
        sums.append(sums[-1] + value)
    spans = [min(reach, i, len(y) - 1 - i) for i in range(len(y))]
    return [(sums[i + s + 1] - sums[i - s]) / (2 * s + 1) for i, s in enumerate(spans)]


def ticks(high: float, about: int = 6) -> list[float]:
    """Round numbers 0, step, 2 step, ... up to `high`; the step is 1, 2, 2.5 or 5 times a power of ten."""
    rough = max(high, 1e-9) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    return [i * step for i in range(int(high / step + 1e-9) + 1)]


class Scale:
    """Data to pixels; both axes start at 0."""

    def __init__(self, high_x: float, high_y: float) -> None:
        self.high_x, self.high_y = high_x or 1.0, high_y or 1.0

    def x(self, value: float) -> float:
        return LEFT + value / self.high_x * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - min(value, self.high_y) / self.high_y * (HEIGHT - TOP - BOTTOM)

    def points(self, x: list[float], y: list[float]) -> str:
        return " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in zip(x, y, strict=True))


def line_chart(lines: list[Line], title: str, x_label: str, y_label: str) -> str:
    """An <svg> element. Non-finite points are left out; spikes above the smoothed curves are cut at the top."""
    lines = [_finite(line) for line in lines]
    smoothed = {line.name: smooth(line.y, max(1, len(line.y) // 30)) for line in lines}
    high_y = max((max(values) for values in smoothed.values() if values), default=1.0) * 1.05
    scale = Scale(max((line.x[-1] for line in lines if line.x), default=1.0), high_y)
    body = _axes(scale, x_label, y_label)
    for line in lines:
        body.append(f'<polyline class="raw c{line.colour}" points="{scale.points(line.x, line.y)}"/>')
    for line in lines:
        points = scale.points(line.x, smoothed[line.name])
        name = f"<title>{escape(line.name)}</title>"
        body.append(f'<polyline class="line c{line.colour}" points="{points}">{name}</polyline>')
    body += _names(scale, lines, smoothed)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">' + "".join(body) + "</svg>"


def _finite(line: Line) -> Line:
    kept = [(a, b) for a, b in zip(line.x, line.y, strict=True) if math.isfinite(b)]
    return Line(line.name, line.colour, [a for a, _ in kept], [b for _, b in kept])


def _axes(scale: Scale, x_label: str, y_label: str) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in ticks(scale.high_y):
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(scale.high_x):
        x = scale.x(value)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text class="axis" transform="translate(12 {(TOP + bottom) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>'
    )
    return parts


def _names(scale: Scale, lines: list[Line], smoothed: dict[str, list[float]]) -> list[str]:
    """A dot at the end of each curve, and the names in their column."""
    drawn = sorted((line for line in lines if line.x), key=lambda line: -smoothed[line.name][-1])
    ends = [(scale.x(line.x[-1]), scale.y(smoothed[line.name][-1])) for line in drawn]
    heights = apart([y for _, y in ends], TOP + 4, HEIGHT - BOTTOM)
    parts = []
    for line, (x, y), height in zip(drawn, ends, heights, strict=True):
        parts.append(f'<circle class="f{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
        place = f'x="{WIDTH - RIGHT + 12}" y="{height + 4:.1f}"'
        parts.append(f'<text class="name f{line.colour}" {place}>{escape(line.name)}</text>')
    return parts
