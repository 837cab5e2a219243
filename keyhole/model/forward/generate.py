"""Generation with a model whose units are not all on the device.

Transformers' generation is a loop that calls the model once per token. There is no second pass for a lockstep: each
unit is loaded when the pass enters it, on the caller's own thread, and the unit before it is released. The head is
computed chunk by chunk. Per token the model crosses the link once, for all rows of the batch.
"""

from typing import Any

import torch
from torch import nn

from keyhole.model.structure.layout import Unit


class Generation:
    """The conductor of one pass on the caller's thread, and that pass itself: units are loaded as they are entered. A
    context, used within a sweep."""

    index = 0
    block_at_once = steady = False

    def __init__(self, model: Any) -> None:
        self.model = model
        self.unit: Unit | None = None
        self.spine = model.acquire_weights(model.layout.spine)

    @property
    def current(self) -> "Generation":
        return self

    def __enter__(self) -> "Generation":
        self.model.head.linear.forward = self._head
        self.model.binding.bind(None, None, self.spine)
        return self

    def __exit__(self, *exc: object) -> None:
        del self.model.head.linear.forward
        self._release()

    def _release(self) -> None:
        if self.unit is not None:
            self.model.engine.release(self.unit.index)
            self.unit = None

    def meet(self, unit: Unit) -> None:
        self._release()
        weights = self.model.acquire_weights(unit)
        self.unit = unit  # only after success: if loading failed, nothing is held, and the error must be seen
        self.model.binding.bind(unit, weights, self.spine)

    def will_meet(self, units: list[Unit]) -> None:
        self.model.expect(units)

    def rows(self, index: int, ids_M: torch.Tensor) -> torch.Tensor:
        return self.model.table_rows(ids_M).to(self.model.dtype)

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        self._release()
        parts = []
        for unit in self.model.layout.head_units:
            self.model.binding.bind_head(unit, self.model.acquire_weights(unit), self.spine)
            parts.append(nn.functional.linear(x, self.model.head.linear.weight, self.model.head.linear.bias))
            self.model.engine.release(unit.index)
        return torch.cat(parts, dim=-1)
