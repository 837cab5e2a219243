"""Times of a step: from one reverse to the next, and none of another."""

from keyhole.methods.lsp.spans import Spans


def test_a_step_is_what_came_between_two_reverses() -> None:
    """Sums and means by name; what comes later is not in them."""
    spans = Spans(cuda=False)
    spans.add("update", 9.0)
    spans.turn()
    for seconds in (1.0, 3.0):
        spans.add("update", seconds)
    with spans.of("forward"):
        pass
    spans.turn()
    spans.add("update", 7.0)
    assert spans.read()["update"] == 4.0 and spans.mean("update") == 2.0 and spans.sums["forward"] >= 0.0
    assert spans.mean("up") == 0.0
