"""One pass over a model whose units are not at hand: generation.

Generation is a loop inside Transformers that calls the model once a token. There is nothing to run in lockstep with, so
a unit is brought in when the pass enters it, on the caller's own thread, and the one before is given back. The head is
computed chunk by chunk. Each token crosses the link once, for all rows of the batch.
"""

from typing import Any

import torch
from torch import nn

from keyhole.model.structure.layout import Unit


class Solo:
    """A conductor for one pass on the caller's thread: units come in as they are entered."""

    index = 0
    whole = steady = False

    def __init__(self, model: Any) -> None:
        self.model, self.current, self.wants = model, self, None
        self.spine = model.clean(model.layout.spine)

    def __enter__(self) -> "Solo":
        self.model.head.linear.forward = self._head
        self.model.binding.bind(None, None, self.spine)
        return self

    def __exit__(self, *exc: object) -> None:
        del self.model.head.linear.forward
        self._leave()

    def _leave(self) -> None:
        if self.wants is not None:
            self.model.engine.release(self.wants.index)
            self.wants = None

    def meet(self, unit: Unit) -> None:
        self._leave()
        self.wants = unit
        self.model.binding.bind(unit, self.model.clean(unit), self.spine)

    def rows(self, index: int, ids_M: torch.Tensor) -> torch.Tensor:
        return self.model.table_rows(ids_M).to(self.model.dtype)

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        self._leave()
        parts = []
        for unit in self.model.layout.head_units:
            self.model.binding.bind_head(unit, self.model.clean(unit), self.spine)
            parts.append(nn.functional.linear(x, self.model.head.linear.weight, self.model.head.linear.bias))
            self.model.engine.release(unit.index)
        return torch.cat(parts, dim=-1)
