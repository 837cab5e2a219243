"""The order of updates on the host: the paper's transition layer, and what comes before what."""

import pytest

from keyhole.methods.lsp.schedule import transition, urgency


def test_the_transition_is_the_papers() -> None:
    """layers - (reverse - (down + up + update)) / max(down, up, update), within the model."""
    assert transition(32, reverse=0.3, down=0.002, up=0.002, update=0.016) == round(32 - (0.3 - 0.02) / 0.016)
    assert transition(32, reverse=9.0, down=0.001, up=0.001, update=0.001) == 0
    assert transition(32, reverse=0.0, down=1.0, up=1.0, update=1.0) == 32
    assert transition(32, reverse=0.0, down=0.0, up=0.0, update=0.0) == 32


@pytest.mark.parametrize("turn", [0, 5, 8])
def test_deep_layers_in_order_of_arrival_shallow_ones_before_them(turn: int) -> None:
    """The head and layers from 7 on arrive; those below the transition overtake, the newest first."""
    order = sorted(range(-1, 9), key=lambda layer: urgency(layer, 8, turn))
    shallow = [layer for layer in range(-1, 9) if layer < turn]
    assert order == shallow + [layer for layer in range(8, -2, -1) if layer >= turn]
