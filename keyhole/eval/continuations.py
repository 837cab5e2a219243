"""Log-likelihoods of continuations: for pairs of tokens (context x, continuation c),

    sum_t log p(c_t | x, c_<t)        and whether greedy decoding would have written c

as evaluation suites need them. All pairs of a call are scored together: sorted by length, batched by tokens, and, if
units are streamed, with `passes` batches per crossing of the weights (rows.py).

The model's input is x and all of c except its last token. Pairs with the same input (the choices A, B, C and D after
one question) share a row: its hidden states are computed once, and several targets are scored at its last position. A
context that is too long for the model loses its beginning; the continuation must fit.
Legend: B rows of a batch, T positions, N scored (position, target) pairs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from keyhole.data.capacity import check_ids
from keyhole.errors import UserError
from keyhole.eval.rows import by_row, not_finite
from keyhole.model.batch import DeviceBatch, move
from keyhole.model.model import Model
from keyhole.model.objective import Tokens

Pair = tuple[Sequence[int], Sequence[int]]


@dataclass
class _Row:
    """The input tokens of a row, and the continuations that end after them: (number of the pair, tokens)."""

    ids: list[int]
    asked: list[tuple[int, list[int]]] = field(default_factory=list)


def score_continuations(
    model: Model, pairs: Sequence[Pair], max_length: int, **options: Any
) -> tuple[list[float], list[bool]]:
    """For each pair, in order: the log-likelihood of the continuation, and whether it is the greedy one. options:
    batch_tokens, passes, watch (rows.py)."""
    rows = _rows(pairs, max_length)
    if rows:
        check_ids([i for pair in pairs for part in pair for i in part], "a request", model.source, model.config)

    def run(group: list[list[int]]) -> list[list[list[tuple[float, bool]]]]:
        made = []
        found = model.token_scores([_sent([rows[i] for i in batch], model.device) for batch in group])
        for batch, (nll_N, best_N) in zip(group, found, strict=True):
            asked = [tokens for i in batch for _, tokens in rows[i].asked]  # in the order of _sent
            sizes = [len(tokens) for tokens in asked]
            parts = zip(nll_N.double().cpu().split(sizes), best_N.cpu().split(sizes), asked, strict=True)
            scores = iter([(-float(nll.sum()), best.tolist() == tokens) for nll, best, tokens in parts])
            made.append([list(islice(scores, len(rows[i].asked))) for i in batch])
        return made

    scores: dict[int, tuple[float, bool]] = {}
    for row, values in zip(rows, by_row(model, [len(row.ids) for row in rows], run, **options), strict=True):
        scores |= zip((number for number, _ in row.asked), values, strict=True)
    if bad := sum(not math.isfinite(value) for value, _ in scores.values()):
        raise not_finite(model, f"log-likelihoods that are not finite ({bad} of {len(pairs)} requests)")
    return [scores[i][0] for i in range(len(pairs))], [scores[i][1] for i in range(len(pairs))]


def _rows(pairs: Sequence[Pair], max_length: int) -> list[_Row]:
    found: dict[tuple[int, ...], _Row] = {}
    for number, (context, continuation) in enumerate(pairs):
        if not context or not 0 < len(continuation) <= max_length:
            raise UserError(
                f"request {number}: {len(context)} tokens of context and {len(continuation)} of continuation; each "
                f"needs one at least, and a continuation has at most max_length={max_length}"
            )
        ids = [*context, *continuation][-(max_length + 1) : -1]
        row = found.setdefault(tuple(ids), _Row(ids))
        row.asked.append((number, list(continuation)))
    return list(found.values())


def _sent(rows: Sequence[_Row], device: torch.device) -> DeviceBatch:
    """The rows, padded on the right, and the scored positions and targets."""
    width = max(len(row.ids) for row in rows)
    ids_BT = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in rows])
    mask_BT = torch.tensor([[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in rows])
    inputs = {"input_ids": ids_BT} if bool(mask_BT.all()) else {"input_ids": ids_BT, "attention_mask": mask_BT}
    index: list[int] = []
    target: list[int] = []
    of_row: list[int] = []
    for b, row in enumerate(rows):
        for _, tokens in row.asked:
            end = b * width + len(row.ids)
            index += range(end - len(tokens), end)
            target += tokens
            of_row += [b] * len(tokens)
    return DeviceBatch(
        inputs={name: move(x, device) for name, x in inputs.items()},
        index_N=move(torch.tensor(index), device),
        target_N=move(torch.tensor(target), device),
        loss=Tokens(move(torch.tensor(of_row), device), len(rows), len(index)),
        token_count=len(index),
    )
