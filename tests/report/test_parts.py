"""The time of a step: shares of what was busy."""

from keyhole.report.parts import busy_seconds, step_time
from keyhole.report.story import Story


def test_time_at_once_counts_once() -> None:
    rows = [("compute", "a", begin, ms) for begin, ms in ((3.0, 2.0), (0.0, 4.0), (1.0, 1.0), (10.0, 1.0))]
    assert busy_seconds([*rows, ("upload", "a", 0.0, 4.0)]) == {"upload": 0.004, "compute": 0.006}


def test_lanes_and_shares() -> None:
    """A step of 10 ms: the link is busy for 8 of them, the GPU for 5."""
    section = step_time(Story(traced_step=3, traced_s=0.01, lanes={"upload": 0.008, "compute": 0.005}))
    assert "Step 3, 0.01 s" in section and "<b>80 %</b>" in section and "<b>50 %</b>" in section
    assert section.index(">upload<") < section.index(">compute<") and "write-back" not in section
    assert step_time(Story()) == ""
