"""The drawing of a step: shares are those of the spans, however many are drawn."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyhole.report.parts import busy, fewer, step_time
from keyhole.report.story import Story

spans = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=1, max_size=40).map(sorted)


@given(spans, st.integers(1, 40))
@example([(0.0, 0.0), (4.0, 0.9), (4.0, 0.9), (4.0, 0.9)], 3)
def test_fewer_spans_cover_all_of_them(found: list[tuple[float, float]], most: int) -> None:
    """Joining loses no busy time, moves neither end, and keeps the order."""
    kept = fewer(found, most)
    assert len(kept) == min(most, len(found))
    assert [begin for begin, _ in kept] == sorted(begin for begin, _ in kept)  # joined ends are rounded
    assert busy(kept) >= busy(found) - 1e-6
    assert kept[0][0] == found[0][0]
    assert max(b + d for b, d in kept) == pytest.approx(max(b + d for b, d in found))
    if len(found) <= most:
        assert kept == found


def test_time_at_once_counts_once() -> None:
    assert busy([(0.0, 4.0), (1.0, 1.0), (3.0, 2.0), (10.0, 1.0)]) == 6.0


def test_lanes_and_shares() -> None:
    """A step of 10 ms: the link is busy for 8 of them, the GPU for 5."""
    told = [("compute", "a", 2.0, 5.0), ("upload", "a", 0.0, 4.0), ("upload", "b", 4.0, 4.0)]
    section = step_time(Story(traced_step=3, traced_s=0.01, spans=told))
    assert "Step 3, 0.01 s" in section and "upload 80 %, compute 50 %" in section
    assert section.index(">upload<") < section.index(">compute<") and "write-back" not in section.partition("</svg>")[2]
    assert step_time(Story()) == ""
    section = step_time(Story(traced_step=3, traced_s=4.056, spans=[("compute", "a", 0.0, 4056.0)]))
    assert re.findall(r'class="tick"[^>]*>([^<]*)<', section) == ["0", "1,014", "2,028", "3,042", "4,056"]
