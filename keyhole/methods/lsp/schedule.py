"""Which layer's update is next on the host: first come first served, then last come first served.

The reverse gives layers from the last to the first; the next forward wants them from the first to the last. As long as
everything that has come can be done before the reverse ends, the order of arrival keeps all lanes busy. From a certain
layer on it cannot, and then a layer deeper in the model must not hold up a shallower one, which is needed earlier
(LSP-Offload, appendix):

    transition = layers - (reverse - (down + up + update)) / max(down, up, update)

with the time of the whole reverse, and of one layer's gradient on its way down, its step on its way up, and its update.
Layers from the transition on are served in order of arrival, shallower ones before all of those and the newest first.
The times are those of the last step, measured; before the first, nothing is known and every layer is "shallow".
Layers whose moments are on the device do not come, and change nothing for the others: they are the shallowest.
"""

from dataclasses import dataclass

from keyhole.methods.lsp.timing import Timing


def transition(layers: int, reverse: float, down: float, up: float, update: float) -> int:
    """The shallowest layer that is served in order of arrival; `layers`: none is. Times in seconds."""
    slowest = max(down, up, update)
    if slowest <= 0.0:
        return layers
    in_time = (reverse - (down + up + update)) / slowest
    return min(layers, max(0, round(layers - in_time)))


def urgency(layer: int, layers: int, transition: int) -> int:
    """Lower is served first. Units in front of the blocks (norms, tables) have layer -1, the head has `layers`."""
    return layer if layer < transition else 2 * layers - layer


@dataclass(frozen=True)
class UpdateOrder:
    """The order for a model: layer_of: unit -> its layer, as `urgency` counts them; timing: of the last step."""

    layer_of: dict[int, int]
    layers: int
    timing: Timing

    def urgency(self, unit: int) -> int:
        seconds = {name: self.timing.mean(name) for name in ("reverse", "down", "up", "update")}
        return urgency(self.layer_of[unit], self.layers, transition(self.layers, **seconds))
