"""The order of layers' updates on the host: first come first served, then last come first served.

The backward pass produces gradients from the last layer to the first; the next forward pass needs weights from the
first to the last. As long as all updates that have arrived can be done before the backward pass ends, the order of
arrival keeps all lanes busy. From a certain layer on they cannot, and then a deeper layer must not delay a shallower
one, which is needed earlier (LSP-Offload, appendix):

    transition = layers - (reverse - (down + up + update)) / max(down, up, update)

with the times of the whole backward pass, and of one layer's gradient copy down, its step's copy up, and its update.
Layers from the transition on are served in order of arrival; shallower ones come before all of those, newest first. The
times are those measured in the last step; before the first step every layer counts as "shallow". Layers whose moments
are on the device do not arrive here, and do not affect the others: they are the shallowest.
"""

from dataclasses import dataclass

from keyhole.methods.lsp.timing import Timing


def transition(layers: int, reverse: float, down: float, up: float, update: float) -> int:
    """The shallowest layer that is served in order of arrival; `layers` if none is. Times in seconds."""
    slowest = max(down, up, update)
    if slowest <= 0.0:
        return layers
    in_time = (reverse - (down + up + update)) / slowest
    return min(layers, max(0, round(layers - in_time)))


def urgency(layer: int, layers: int, transition: int) -> int:
    """Lower is served first. Units before the blocks (norms, tables) have layer -1, the head has `layers`."""
    return layer if layer < transition else 2 * layers - layer


@dataclass(frozen=True)
class UpdateOrder:
    """The order for a model. layer_of: unit -> its layer, as `urgency` counts them; timing: of the last step."""

    layer_of: dict[int, int]
    layers: int
    timing: Timing

    def urgency(self, unit: int) -> int:
        seconds = {name: self.timing.mean(name) for name in ("reverse", "down", "up", "update")}
        return urgency(self.layer_of[unit], self.layers, transition(self.layers, **seconds))
