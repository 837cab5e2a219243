"""Generation with a model whose units are not all on the device.

Transformers' generation is a loop that calls the model once per token. There is no second pass for a lockstep: each
unit is loaded when the pass enters it, on the caller's own thread, and the unit before it is released. The head is
computed chunk by chunk. Per token the model crosses the link once, for all rows of the batch. The logits of all
positions (`logits`) are one such call.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.model.batch import Batch, check_tokens
from keyhole.model.structure.layout import Unit


class Generation:
    """The conductor of one pass on the caller's thread, and that pass itself: units are loaded as they are entered. A
    context, used within a sweep."""

    index = 0
    block_at_once = steady = False

    def __init__(self, model: Any) -> None:
        self.model = model
        self.unit: Unit | None = None
        self.spine = model.device_weights.acquire(model.layout.spine)

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
        weights = self.model.device_weights.acquire(unit)
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
            self.model.binding.bind_head(unit, self.model.device_weights.acquire(unit), self.spine)
            parts.append(nn.functional.linear(x, self.model.head.linear.weight, self.model.head.linear.bias))
            self.model.engine.release(unit.index)
        return torch.cat(parts, dim=-1)


@contextmanager
def usable(model: Any, what: str) -> Iterator[None]:
    """A context in which the module may be called: with all of its weights at home, or as one pass that loads units."""
    model.check_idle()
    model.apply_deferred()
    if model.is_plain:
        model.engine.wait_for_homes()  # a method may still be updating them
        yield
        return
    with model.sweep(what), Generation(model) as conductor, model.conducted_by(conductor):
        yield


def logits(model: Any, batch: Batch) -> torch.Tensor:
    """[B, T, V]: the logits of a decoder at all positions of a batch."""
    if not isinstance(batch, Mapping):
        raise UserError(f"batch: found a {type(batch).__name__}, expected a dict of tensors with input_ids")
    check_ids(model, batch.get("input_ids"))
    sent = {name: x.to(model.device) for name, x in batch.items() if name != "labels"}
    with usable(model, "logits"):
        return model.module(**sent, use_cache=False).logits


def generate(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """The tokens of the prompts and of their answers. options: those of Transformers' `generate`."""
    if model.classifies:
        raise UserError(f"model: {type(model.module).__name__} classifies texts and cannot write any")
    check_ids(model, input_ids)
    input_ids = input_ids.to(model.device)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(model.device)
    with usable(model, "generate"):
        return model.module.generate(input_ids=input_ids, attention_mask=mask, **options)


def check_ids(model: Any, input_ids: Any) -> None:
    """Refuses what is no batch of tokens of the model: on a GPU an unknown token would end the process."""
    if not isinstance(input_ids, torch.Tensor):
        found = type(input_ids).__name__
        raise UserError(f"input_ids: found a {found}, expected the tokens: tokenizer(text, return_tensors='pt')")
    if input_ids.ndim != 2 or not input_ids.numel() or input_ids.is_floating_point():
        found = f"{tuple(input_ids.shape)} of {str(input_ids.dtype).removeprefix('torch.')}"
        raise UserError(f"input_ids: found {found}, expected integers [rows, length], of one token at least")
    check_tokens("input_ids", input_ids, model.layout.table.shape[0])
