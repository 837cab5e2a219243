"""The timeline: free when it is off, a readable trace when it is on."""

import pytest
import torch

from keyhole.offload.engine import Engine
from keyhole.offload.timeline import Timeline


def test_the_engine_marks_all_lanes() -> None:
    """Every page is uploaded, worked on and written back in turn; on a CPU no two spans are at the same time, and the
    work on a page ends when the next is asked for or the sweep is over."""
    homes = [torch.zeros(4), torch.ones(4), torch.full((4,), 2.0)]
    engine = Engine(homes, {1, 2}, torch.device("cpu"), slot_count=2)
    engine.timeline = timeline = Timeline(cuda=False)
    with engine.sweep("test", [1, 2]):
        for page in (1, 2):
            engine.acquire(page).add_(1)
            engine.commit(page)
            engine.release(page)
    timeline.stop()
    with engine.sweep("test", [1, 2]):
        engine.acquire(0)
    rows = timeline.rows()
    assert timeline.is_done()
    ran = [(lane, label) for lane, label, _, _ in rows]
    for page in (1, 2):
        assert {("upload", f"page {page}"), ("compute", f"page {page}"), ("write-back", f"page {page}")} <= set(ran)
    assert ("compute", "page 0") not in ran
    in_turn = sorted((begin, begin + ms) for _, _, begin, ms in rows)
    assert in_turn[0][0] >= 0
    assert all(first[1] <= second[0] + 1e-6 for first, second in zip(in_turn, in_turn[1:], strict=False))
    assert torch.equal(homes[1], torch.full((4,), 2.0))


@pytest.mark.gpu
def test_spans_are_measured_on_the_device() -> None:
    timeline = Timeline()
    with timeline.span("compute", "sleep"):
        torch.cuda._sleep(20_000_000)
    lane, label, start_ms, duration_ms = timeline.rows()[0]
    assert (lane, label) == ("compute", "sleep") and start_ms >= 0 and duration_ms > 1
