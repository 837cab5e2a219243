"""Passes without gradients: the loss of tokens and rows, the likeliest tokens, a classifier's logits.

All batches of a call run in lockstep (lockstep.py), so each unit crosses the link once for all of them, and the chunks
of the output matrix are visited once, after the last block. Per pass only the hidden states at trained positions and
three numbers per trained token are kept (ops/loss.py), never the logits of the whole vocabulary.
Legend: B rows, L labels, M tokens looked up, N trained tokens.
"""

from collections.abc import Callable
from typing import Any

import torch

from keyhole.model.batch import DeviceBatch
from keyhole.model.structure.layout import Unit
from keyhole.ops.loss import RunningChoice, RunningNLL

Result = Callable[[list[torch.Tensor], torch.Tensor], list[Any]]
"""(hidden states of all passes, spine) -> one result per pass; called within the sweep."""


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


def evaluated(model: Any, batches: list[DeviceBatch], result: Result) -> list[Any]:
    """Runs one pass per batch; returns one result per pass."""
    model.apply_deferred()
    return swept(model, batches, result)


def swept(model: Any, batches: list[DeviceBatch], result: Result) -> list[Any]:
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
