"""Passes without gradients: the loss of tokens and rows, the likeliest tokens, a classifier's logits.

All batches of a call run in lockstep (lockstep.py), so each unit crosses the link once for all of them, and the chunks
of the output matrix are visited once, after the last block. Per pass only the hidden states at trained positions and
three numbers per trained token are kept (ops/loss.py), never the logits of the whole vocabulary.

Transformers' generation is a loop that calls the model once per token: one pass, which meets every unit once per token,
the chunks of the head too. Per token the model crosses the link once, for all rows of the batch. The logits of all
positions (`logits`) are one such call.
Legend: B rows, L labels, M tokens looked up, N trained tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.model.batch import Batch, DeviceBatch, check_tokens
from keyhole.model.forward.hooks import replaced_forwards
from keyhole.model.structure.layout import Unit
from keyhole.ops.loss import RunningChoice, RunningNLL

T = TypeVar("T")
# (hidden states of all passes, common) -> one result per pass; called within the sweep.
Result = Callable[[list[torch.Tensor], torch.Tensor], list[T]]


def nll_by_row(model: Any, batches: list[DeviceBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Summed NLL and number of trained tokens of each row, per batch."""

    def losses(hidden: list[torch.Tensor], common: torch.Tensor) -> list[torch.Tensor]:
        if model.classifies:
            return [model.head.nll(x, b.target_N) for x, b in zip(hidden, batches, strict=True)]
        return [state.nll_N() for state in after_the_head(model, hidden, batches, common)]

    found = swept(model, batches, losses)
    return [(b.loss.sum_by_row(nll_N), b.loss.count_by_row()) for nll_N, b in zip(found, batches, strict=True)]


def nll_by_token(model: Any, batches: list[DeviceBatch]) -> list[torch.Tensor]:
    """The NLL of each target, per batch, at the weights as they are at home, without updates that wait."""
    states = swept(model, batches, lambda x, common: after_the_head(model, x, batches, common), at_home=True)
    return [state.nll_N() for state in states]


def token_scores(model: Any, batches: list[DeviceBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(nll_N, best_N) per batch."""
    states = swept(model, batches, lambda x, common: after_the_head(model, x, batches, common, RunningChoice))
    return [(state.nll_N(), state.best_N) for state in states]


def class_logits(model: Any, batches: list[DeviceBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits [B, L] and losses [B] per batch, in float32."""
    found = swept(model, batches, lambda logits, common: logits)
    return [(x.float(), model.head.nll(x, b.target_N)) for x, b in zip(found, batches, strict=True)]


def swept(model: Any, batches: list[DeviceBatch], result: Result[T], at_home: bool = False) -> list[T]:
    """Runs one pass per batch; returns one result per pass. at_home: at the weights as they are at home, without
    updates that wait."""
    if not at_home:
        model.apply_deferred()

    def serve(unit: Unit | None, resume: Callable[[int], None]) -> None:
        model.binding.bind(unit, model.device_weights.acquire(unit) if unit else None, common)
        for i in range(len(batches)):
            resume(i)
        if unit:
            model.engine.release(unit.index)

    with model.sweep("evaluate"):
        common = model.device_weights.acquire(model.layout.common)
        hidden = model.lockstep(batches, serve, lambda i, ids_M: model.table_rows(ids_M).to(model.dtype))
        return result(hidden, common)


def after_the_head(
    model: Any,
    hidden: list[torch.Tensor],
    batches: list[DeviceBatch],
    common: torch.Tensor,
    kind: type[RunningNLL] = RunningNLL,
) -> list[Any]:
    """For every pass, the loss state of its trained tokens after all chunks of the vocabulary."""
    running = [kind(b.target_N) for b in batches]
    for unit in model.layout.head_units:
        model.binding.bind_head(unit, model.device_weights.acquire(unit), common)
        for state, x in zip(running, hidden, strict=True):
            model.head.add_nll(state, x, unit.rows[0])
        model.engine.release(unit.index)
    return running


def alone(model: Any, what: str, call: Callable[[], T]) -> T:
    """call(), which uses the module: with all of its weights at home, or as the one pass of a lockstep that meets the
    chunks of the head too."""
    model.check_idle()
    model.apply_deferred()
    if model.device_weights.is_plain:
        model.engine.wait_for_homes()  # a method may still be updating them
        return call()

    def serve(unit: Unit | None, resume: Callable[[int], None]) -> None:
        weights = model.device_weights.acquire(unit) if unit else None
        if unit is None or unit.kind == "block":
            model.binding.bind(unit, weights, common)
        else:
            model.binding.bind_head(unit, weights, common)
        resume(0)
        if unit:
            model.engine.release(unit.index)

    def head(x: torch.Tensor) -> torch.Tensor:
        parts = []
        for unit in model.layout.head_units:
            model.conductor.current.meet(unit)
            parts.append(nn.functional.linear(x, linear.weight, linear.bias))
        return torch.cat(parts, dim=-1)

    linear = model.head.linear
    with model.sweep(what), replaced_forwards([linear], [head]):
        common = model.device_weights.acquire(model.layout.common)
        found: list[T] = model.conduct([call], serve, lambda i, ids_M: model.table_rows(ids_M).to(model.dtype))
        return found[0]


def logits(model: Any, batch: Batch) -> torch.Tensor:
    """[B, T, V]: the logits of a decoder at all positions of a batch."""
    if not isinstance(batch, Mapping):
        raise UserError(f"batch: found a {type(batch).__name__}, expected a dict of tensors with input_ids")
    check_ids(model, batch.get("input_ids"))
    sent = {name: x.to(model.device) for name, x in batch.items() if name != "labels"}
    found: torch.Tensor = alone(model, "logits", lambda: model.module(**sent, use_cache=False).logits)
    return found


def generate(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, options: dict[str, object]
) -> torch.Tensor:
    """The tokens of the prompts and of their answers. options: those of Transformers' `generate`."""
    if model.classifies:
        raise UserError(f"model: {type(model.module).__name__} classifies texts and cannot write any")
    check_ids(model, input_ids)
    input_ids = input_ids.to(model.device)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(model.device)
    options = {"input_ids": input_ids, "attention_mask": mask} | options
    return alone(model, "generate", lambda: model.module.generate(**options))


def check_ids(model: Any, input_ids: object) -> None:
    """Refuses what is no batch of tokens of the model: on a GPU an unknown token would end the process."""
    if not isinstance(input_ids, torch.Tensor):
        found = type(input_ids).__name__
        raise UserError(f"input_ids: found a {found}, expected the tokens: tokenizer(text, return_tensors='pt')")
    if input_ids.ndim != 2 or not input_ids.numel() or input_ids.is_floating_point():
        found = f"{tuple(input_ids.shape)} of {str(input_ids.dtype).removeprefix('torch.')}"
        raise UserError(f"input_ids: found {found}, expected integers [rows, length], of one token at least")
    check_tokens("input_ids", input_ids, model.layout.table.shape[0])
