"""Where the time of a step goes: its trace as a drawing, with a lane each for upload, compute, write-back, and copies
of gradients to the CPU.

A span is the copy or the computation of one unit. Lanes work in parallel, so the lane without gaps bounds the step. The
share of a lane is its busy time over the time of the step; overlapping spans of a lane count once. If there are more
than MOST spans, neighbours are joined: a drawing of 700 units would not show more.
"""

from collections.abc import Sequence
from html import escape

from keyhole.report.story import Span, Story

WIDTH, LEFT, RIGHT, LANE, TOP, BOTTOM = 860, 108, 76, 34, 8, 46
LANES = ("upload", "compute", "write-back", "gradients")
MOST = 400  # spans of a lane


def step_time(story: Story) -> str:
    """The section; empty if no step was traced."""
    if not story.spans:
        return ""
    lanes = [*LANES, *dict.fromkeys(lane for lane, *_ in story.spans if lane not in LANES)][:6]
    own = {lane: sorted((begin, ms) for name, _, begin, ms in story.spans if name == lane) for lane in lanes}
    own = {lane: spans for lane, spans in own.items() if spans}
    end = max(begin + ms for spans in own.values() for begin, ms in spans)
    start = min(0.0, *(spans[0][0] for spans in own.values()))
    step_ms = 1e3 * story.traced_s or end - start
    shares = {lane: busy(spans) / max(step_ms, 1e-9) for lane, spans in own.items()}
    told = ", ".join(f"{lane} {100 * min(1.0, share):.0f} %" for lane, share in shares.items())
    return (
        f"<section><h2>Where the time of a step goes</h2><figure class='trace'>{_drawing(own, shares, start, end)}"
        f"<figcaption>Step {story.traced_step:,}, {1e-3 * step_ms:.3g} s, as traced. Busy: {escape(told)} of the "
        f"step. {'A gap in compute is a wait for an upload, or work outside of the units.' if len(own) > 1 else ''}"
        "</figcaption></figure></section>"
    )


def busy(spans: Sequence[tuple[float, float]]) -> float:
    """The time that sorted spans cover; overlaps count once."""
    total, reached = 0.0, float("-inf")
    for begin, duration in spans:
        end = begin + duration
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def fewer(spans: Sequence[tuple[float, float]], most: int = MOST) -> list[tuple[float, float]]:
    """Sorted spans, with neighbours joined (smallest gaps first) until there are at most `most`."""
    ends = [begin + duration for begin, duration in spans]
    by_gap = sorted(range(1, len(spans)), key=lambda i: spans[i][0] - ends[i - 1])
    joined = set(by_gap[: max(0, len(spans) - most)])  # with the one before
    made: list[tuple[float, float]] = []
    for i, (begin, duration) in enumerate(spans):
        if i in joined:
            first, length = made[-1]
            made[-1] = first, max(first + length, ends[i]) - first
        else:
            made.append((begin, duration))
    return made


def _drawing(lanes: dict[str, list[tuple[float, float]]], shares: dict[str, float], start: float, end: float) -> str:
    height = TOP + LANE * len(lanes) + BOTTOM
    scale = (WIDTH - LEFT - RIGHT) / max(end - start, 1e-9)
    parts = []
    for row, (lane, spans) in enumerate(lanes.items()):
        y = TOP + LANE * row
        parts.append(f'<text class="axis" x="{LEFT - 10}" y="{y + 21}" text-anchor="end">{escape(lane[:12])}</text>')
        parts.append(f'<rect class="lane" x="{LEFT}" y="{y + 4}" width="{WIDTH - LEFT - RIGHT}" height="{LANE - 8}"/>')
        for begin, duration in fewer(spans):
            x, width = LEFT + (begin - start) * scale, max(duration * scale, 0.6)
            parts.append(
                f'<rect class="f{row}" x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="{LANE - 8}">'
                f"<title>{escape(lane)}: {duration:.2f} ms</title></rect>"
            )
        share = f"{100 * min(1.0, shares[lane]):.0f} %"
        parts.append(f'<text class="axis" x="{WIDTH - RIGHT + 10}" y="{y + 21}">{share}</text>')
    bottom = TOP + LANE * len(lanes)
    for i in range(5):
        at = start + (end - start) * i / 4
        x_text = f"{LEFT + (at - start) * scale:.1f}"
        parts.append(f'<line class="grid" x1="{x_text}" x2="{x_text}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x_text}" y="{bottom + 18}" text-anchor="middle">{_tick(at)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{height - 6}" text-anchor="middle">milliseconds</text>')
    label = "upload, compute and write-back during one step"
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _tick(at_ms: float) -> str:
    """Three digits, or all of a whole number: `1,014`, not `1.01e+03`."""
    return f"{at_ms:,.0f}" if at_ms >= 999.5 else f"{at_ms:.3g}"


def spans_of(rows: Sequence[Span]) -> list[Span]:
    """Spans as saved: rounded to a microsecond."""
    return [(lane, label, round(begin, 3), round(duration, 3)) for lane, label, begin, duration in rows]
