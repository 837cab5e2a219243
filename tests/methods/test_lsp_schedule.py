"""The order of updates on the host: the paper's transition layer, and what comes before what."""

import pytest

from keyhole.methods.lsp_schedule import Times, urgency


def test_the_transition_is_the_papers() -> None:
    """layers - (reverse - (down + up + update)) / max(down, up, update), within the model."""
    times = Times(reverse_s=0.3, down_s=0.002, up_s=0.002, update_s=0.016)
    assert times.transition(32) == round(32 - (0.3 - 0.02) / 0.016)
    assert Times(reverse_s=9.0, down_s=0.001, up_s=0.001, update_s=0.001).transition(32) == 0
    assert Times(reverse_s=0.0, down_s=1.0, up_s=1.0, update_s=1.0).transition(32) == 32
    assert Times().transition(32) == 32


@pytest.mark.parametrize("transition", [0, 5, 8])
def test_deep_layers_in_order_of_arrival_shallow_ones_before_them(transition: int) -> None:
    """Layers arrive from 7 to 0; those below the transition overtake, the newest first."""
    order = sorted(range(-1, 8), key=lambda layer: urgency(layer, 8, transition))
    shallow = [layer for layer in range(-1, 8) if layer < transition]
    assert order == shallow + list(range(7, max(transition, 0) - 1, -1)) if transition else order[-1] == 0
