"""The plan as one self-contained page: a chart of memory against speed, and the whole table. No script, no external
files.

The chart has GPU memory to the right and tokens per second upwards (both logarithmic), a line per method from
everything streamed to everything resident, hollow points where a row does not fit, and the budget as a dashed line.
Names are right of the plot and do not overlap. All text from files or arguments is escaped.
"""

import math
from collections.abc import Sequence
from html import escape

from keyhole.machine.sizes import GIB
from keyhole.pages.chart import apart
from keyhole.pages.frame import colour_of, header, page, section, table, td, th, tr
from keyhole.plan.advice import reason, settings_of
from keyhole.plan.table import Question, Row

WIDTH, HEIGHT = 560, 380
LEFT, RIGHT, TOP, BOTTOM = 86, 130, 26, 48
HEAD = (
    ("method", "", ""), ("placement", "", ""), ("wire", "", ""), ("GPU", "GiB", ""), ("host", "GiB", ""),
    ("disk", "GiB", ""), ("step", "s", ""), ("pace", "tokens/s", ""), ("time", "hours", ""), ("bound by", "", ""),
    ("parts", "", "left"), ("fits", "", "left"),
)  # fmt: skip
EXTRA = """.plan{max-width:680px}.hollow{fill:var(--card);stroke-width:2}.no td,.no th{color:var(--soft)}
.take th,.take td{font-weight:700}.take th{color:var(--glow)}.budget{stroke:var(--glow);stroke-dasharray:5 4}
.parts{display:flex;height:8px;width:110px;border-radius:3px;overflow:hidden;background:var(--line)}
.parts span{display:block;height:100%}thead .left{min-width:0}"""


def make_page(title: str, rows: Sequence[Row], chosen: Row | None, question: Question, about: Sequence[str]) -> str:
    """The page. about: lines about the model, the machine and the batches."""
    colours = colour_of(dict.fromkeys(row.method for row in rows))
    lead = "Nothing fits. See `keyhole plan` for what would."
    if chosen is not None:
        lead = f"<b>{escape(settings_of(chosen, question))}</b>: {escape(reason(chosen, rows, question))}."
    parts = [
        header("keyhole plan", title, lead, about),
        section(
            "GPU memory and pace",
            f"<figure class='plan'>{_chart(rows, colours, question, chosen)}</figure>",
            "A dot per placement of a method in the dtype of compute; hollow: does not fit.",
            level=3,
        ),
        section(
            "Every row",
            table([th(name, kind, unit) for name, unit, kind in HEAD], [_line(r, r is chosen, colours) for r in rows]),
            f"Hours: to learn what {question.steps:,.0f} steps of AdamW learn, by a rule of thumb per method "
            "(docs/plan.md). Bars: seconds of compute, link and CPU, which overlap.",
            level=3,
        ),
    ]
    return page(title, parts, EXTRA)


class _Axes:
    """Maps data to pixels; both axes are logarithmic."""

    def __init__(self, x: Sequence[float], y: Sequence[float]) -> None:
        self.x0, self.x1 = math.log(min(x) / 1.12), math.log(max(x) * 1.12)
        self.y0, self.y1 = math.log(min(y) / 1.2), math.log(max(y) * 1.2)

    def x(self, value: float) -> float:
        return LEFT + (math.log(value) - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (math.log(value) - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten between two logarithms; fewer if there would be too many."""
    exponents = range(math.floor(low / math.log(10)) - 1, math.ceil(high / math.log(10)) + 1)
    found = [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= math.log(m * 10.0**e) <= high]
    return found if len(found) <= 8 else [v for v in found if f"{v:e}"[0] == "1"] or found[::3]


def _memory(row: Row, question: Question) -> float:
    return max((row.gpu_bytes if question.gpu_bytes is not None else row.host_bytes) / GIB, 1e-3)


def _chart(rows: Sequence[Row], colours: dict[str, int], question: Question, chosen: Row | None) -> str:
    drawn = [row for row in rows if row.wire is None or row is chosen]
    budget = (question.gpu_bytes if question.gpu_bytes is not None else question.host_bytes) / GIB
    x = [_memory(row, question) for row in drawn]
    axes = _Axes([*x, *([budget] if min(x) / 3 <= budget <= 3 * max(x) else [])], [r.tokens_per_second for r in drawn])
    where = "GPU" if question.gpu_bytes is not None else "host"
    parts = _grid(axes, f"peak {where} memory, GiB", "tokens per second")
    if axes.x0 <= math.log(budget) <= axes.x1:
        at = f"{axes.x(budget):.1f}"
        parts.append(f'<line class="budget" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{at}" y="{TOP - 8}" text-anchor="middle">room: {budget:.3g} GiB</text>')
    ends: list[tuple[float, str]] = []
    for name, colour in colours.items():
        own = sorted((row for row in drawn if row.method == name), key=lambda row: _memory(row, question))
        if not own:
            continue
        points = [(axes.x(_memory(row, question)), axes.y(row.tokens_per_second)) for row in own]
        if len(points) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            parts.append(f'<polyline class="line c{colour}" points="{path}"/>')
        for row, (a, b) in zip(own, points, strict=True):
            kind = f"f{colour}" if row.fits else f"hollow c{colour}"
            ring = f'<circle class="c{colour}" fill="none" cx="{a:.1f}" cy="{b:.1f}" r="9" stroke-width="2"/>'
            parts.append(ring if row is chosen else "")
            parts.append(
                f'<circle class="{kind}" cx="{a:.1f}" cy="{b:.1f}" r="4.5"><title>{escape(_said(row))}</title>'
            )
            parts.append("</circle>")
        ends.append((points[-1][1], name))
    ends.sort()
    for height, (_, name) in zip(apart([y for y, _ in ends], TOP + 4, HEIGHT - BOTTOM - 8), ends, strict=True):
        place = f'x="{WIDTH - RIGHT + 10}" y="{height + 4:.1f}"'
        parts.append(f'<text class="name f{colours[name]}" {place}>{escape(name)}</text>')
    label = "tokens per second over peak GPU memory, a line per method"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _grid(axes: _Axes, x_label: str, y_label: str) -> list[str]:
    bottom, right, parts = HEIGHT - BOTTOM, WIDTH - RIGHT, []
    for value in ticks(axes.y0, axes.y1):
        y = axes.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{value:,.6g}</text>')
    for value in ticks(axes.x0, axes.x1):
        x = f"{axes.x(value):.1f}"
        parts.append(f'<text class="tick" x="{x}" y="{bottom + 20}" text-anchor="middle">{value:g}</text>')
    middle, turned = (LEFT + right) / 2, f"translate(14 {(TOP + bottom) / 2}) rotate(-90)"
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text class="axis" transform="{turned}" text-anchor="middle">{escape(y_label)}</text>')
    return parts


def _said(row: Row) -> str:
    fits = "" if row.fits else f"; lacks {row.missing}"
    return f"{row.method}, {row.placement}: {row.gpu_bytes / GIB:.1f} GiB, {row.step_seconds:.3g} s per step{fits}"


def _line(row: Row, take: bool, colours: dict[str, int]) -> str:
    texts = [
        row.placement, row.stored, f"{row.gpu_bytes / GIB:.2f}", f"{row.host_bytes / GIB:.1f}",
        f"{row.disk_bytes / GIB:.0f}", f"{row.step_seconds:.3g}", f"{row.tokens_per_second:,.0f}", f"{row.hours:.2g}",
        row.bound_by,
    ]  # fmt: skip
    fits = td("yes" if row.fits else f"lacks {row.missing}", "left")
    cells = [*map(td, texts), f"<td>{_bar(row)}</td>", fits]
    return tr(row.method, cells, colours[row.method], "take" if take else "" if row.fits else "no")


def _bar(row: Row) -> str:
    if row.seconds is None:
        return ""
    parts = {"compute": (row.seconds.compute, 0), "link": (row.seconds.link, 1), "CPU": (row.seconds.cpu, 2)}
    total = sum(value for value, _ in parts.values()) or 1.0
    spans = "".join(
        f"<span class='b{colour}' style='width:{100 * value / total:.0f}%' title='{name}: {value:.3g} s'></span>"
        for name, (value, colour) in parts.items()
        if value
    )
    return f"<span class='parts'>{spans}</span>"
