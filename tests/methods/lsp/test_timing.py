"""Times of a step: from one reverse to the next, and none of another."""

from keyhole.methods.lsp.timing import Timing


def test_a_step_is_what_came_between_two_reverses() -> None:
    """Sums and means by name; what comes later is not in them."""
    timing = Timing(cuda=False)
    timing.add("update", 9.0)
    timing.turn()
    for seconds in (1.0, 3.0):
        timing.add("update", seconds)
    with timing.of("forward"):
        pass
    timing.turn()
    timing.add("update", 7.0)
    assert timing.read()["update"] == 4.0 and timing.mean("update") == 2.0 and timing.sums["forward"] >= 0.0
    assert timing.mean("up") == 0.0
