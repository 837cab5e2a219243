"""Passes without gradients: the loss of tokens and rows, the likeliest tokens, a classifier's logits.

All batches of a call run in lockstep (lockstep.py), so each unit crosses the link once for all of them, and the chunks
of the output matrix are visited once, after the last block. Per pass only the hidden states at trained positions and
three numbers per trained token are kept (ops/loss.py), never the logits of the whole vocabulary.

Transformers' generation is a loop that calls the model once per token. There is no second pass for a lockstep: each
unit is loaded when the pass enters it, on the caller's own thread, and the unit before it is released. The head is
computed chunk by chunk. Per token the model crosses the link once, for all rows of the batch. The logits of all
positions (`logits`) are one such call.
Legend: B rows, L labels, M tokens looked up, N trained tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.model.batch import Batch, DeviceBatch, check_tokens
from keyhole.model.structure.layout import Unit
from keyhole.ops.loss import RunningChoice, RunningNLL

T = TypeVar("T")
# (hidden states of all passes, spine) -> one result per pass; called within the sweep.
Result = Callable[[list[torch.Tensor], torch.Tensor], list[T]]


def nll_by_row(model: Any, batches: list[DeviceBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Summed NLL and number of trained tokens of each row, per batch."""

    def losses(hidden: list[torch.Tensor], spine: torch.Tensor) -> list[torch.Tensor]:
        if model.classifies:
            return [model.head.nll(x, b.target_N) for x, b in zip(hidden, batches, strict=True)]
        return [state.nll_N() for state in after_the_head(model, hidden, batches, spine)]

    found = evaluated(model, batches, losses)
    return [(b.loss.sum_by_row(nll_N), b.loss.count_by_row()) for nll_N, b in zip(found, batches, strict=True)]


def nll_by_token(model: Any, batches: list[DeviceBatch]) -> list[torch.Tensor]:
    """The NLL of each target, per batch, at the weights as they are at home, without updates that wait."""
    states = swept(model, batches, lambda x, spine: after_the_head(model, x, batches, spine))
    return [state.nll_N() for state in states]


def token_scores(model: Any, batches: list[DeviceBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(nll_N, best_N) per batch."""
    states = evaluated(model, batches, lambda x, spine: after_the_head(model, x, batches, spine, RunningChoice))
    return [(state.nll_N(), state.best_N) for state in states]


def class_logits(model: Any, batches: list[DeviceBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits [B, L] and losses [B] per batch, in float32."""
    found = evaluated(model, batches, lambda logits, spine: logits)
    return [(x.float(), model.head.nll(x, b.target_N)) for x, b in zip(found, batches, strict=True)]


def evaluated(model: Any, batches: list[DeviceBatch], result: Result[T]) -> list[T]:
    """Runs one pass per batch; returns one result per pass."""
    model.apply_deferred()
    return swept(model, batches, result)


def swept(model: Any, batches: list[DeviceBatch], result: Result[T]) -> list[T]:
    """Like `evaluated`, without deferred updates: at the weights that are at home."""

    def serve(unit: Unit | None, resume: Callable[[int], None]) -> None:
        model.binding.bind(unit, model.device_weights.acquire(unit) if unit else None, spine)
        for i in range(len(batches)):
            resume(i)
        if unit:
            model.engine.release(unit.index)

    with model.sweep("evaluate"):
        spine = model.device_weights.acquire(model.layout.spine)
        hidden = model.lockstep(batches, serve, lambda i, ids_M: model.table_rows(ids_M).to(model.dtype))
        return result(hidden, spine)


def after_the_head(
    model: Any,
    hidden: list[torch.Tensor],
    batches: list[DeviceBatch],
    spine: torch.Tensor,
    kind: type[RunningNLL] = RunningNLL,
) -> list[Any]:
    """For every pass, the loss state of its trained tokens after all chunks of the vocabulary."""
    running = [kind(b.target_N) for b in batches]
    for unit in model.layout.head_units:
        model.binding.bind_head(unit, model.device_weights.acquire(unit), spine)
        for state, x in zip(running, hidden, strict=True):
            model.head.add_nll(state, x, unit.rows[0])
        model.engine.release(unit.index)
    return running


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
    if model.device_weights.is_plain:
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
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, options: dict[str, object]
) -> torch.Tensor:
    """The tokens of the prompts and of their answers. options: those of Transformers' `generate`."""
    if model.classifies:
        raise UserError(f"model: {type(model.module).__name__} classifies texts and cannot write any")
    check_ids(model, input_ids)
    input_ids = input_ids.to(model.device)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(model.device)
    with usable(model, "generate"):
        return model.module.generate(input_ids=input_ids, attention_mask=mask, **options)


def check_ids(model: Any, input_ids: object) -> None:
    """Refuses what is no batch of tokens of the model: on a GPU an unknown token would end the process."""
    if not isinstance(input_ids, torch.Tensor):
        found = type(input_ids).__name__
        raise UserError(f"input_ids: found a {found}, expected the tokens: tokenizer(text, return_tensors='pt')")
    if input_ids.ndim != 2 or not input_ids.numel() or input_ids.is_floating_point():
        found = f"{tuple(input_ids.shape)} of {str(input_ids.dtype).removeprefix('torch.')}"
        raise UserError(f"input_ids: found {found}, expected integers [rows, length], of one token at least")
    check_tokens("input_ids", input_ids, model.layout.table.shape[0])
