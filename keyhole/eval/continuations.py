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
from typing import Any

import torch

from keyhole.data.capacity import check_ids
from keyhole.errors import UserError
from keyhole.eval.rows import by_row, not_finite
from keyhole.model.batch import DeviceBatch, move
from keyhole.model.model import Model
from keyhole.model.objective import Tokens

Pair = tuple[Sequence[int], Sequence[int]]


def score_continuations(
    model: Model, pairs: Sequence[Pair], max_length: int, **options: Any
) -> tuple[list[float], list[bool]]:
    """For each pair, in order: the log-likelihood of the continuation, and whether it is the greedy one. options:
    batch_tokens, passes, watch (rows.py)."""
    asked: dict[tuple[int, ...], list[int]] = {}  # the input tokens of a row: the numbers of the pairs that share it
    for number, (context, continuation) in enumerate(pairs):
        if not context or not 0 < len(continuation) <= max_length:
            raise UserError(
                f"request {number}: {len(context)} tokens of context and {len(continuation)} of continuation; each "
                f"needs one at least, and a continuation has at most max_length={max_length}"
            )
        asked.setdefault(tuple([*context, *continuation][-(max_length + 1) : -1]), []).append(number)
    if pairs:
        check_ids([i for pair in pairs for part in pair for i in part], "a request", model.source, model.config)
    inputs, numbers = list(asked), list(asked.values())

    def run(group: list[list[int]]) -> list[list[list[tuple[float, bool]]]]:
        made, targets = [], [[[list(pairs[n][1]) for n in numbers[i]] for i in batch] for batch in group]
        sent = [_sent([inputs[i] for i in b], rows, model.device) for b, rows in zip(group, targets, strict=True)]
        for rows, (nll_N, best_N) in zip(targets, model.token_scores(sent), strict=True):
            sizes = [len(tokens) for row in rows for tokens in row]
            parts = zip(nll_N.double().cpu().split(sizes), best_N.cpu().split(sizes), strict=True)
            scored = ((-float(nll.sum()), best.tolist()) for nll, best in parts)
            made.append([[(total, best == tokens) for tokens, (total, best) in zip(row, scored)] for row in rows])  # noqa: B905
        return made

    scores: dict[int, tuple[float, bool]] = {}
    for own, values in zip(numbers, by_row(model, [len(ids) for ids in inputs], run, **options), strict=True):
        scores |= zip(own, values, strict=True)
    if bad := sum(not math.isfinite(value) for value, _ in scores.values()):
        raise not_finite(model, f"log-likelihoods that are not finite ({bad} of {len(pairs)} requests)")
    return [scores[i][0] for i in range(len(pairs))], [scores[i][1] for i in range(len(pairs))]


def _sent(inputs: Sequence[tuple[int, ...]], targets: list[list[list[int]]], device: torch.device) -> DeviceBatch:
    """Rows of input tokens, padded on the right, and the scored positions and targets of each."""
    width = max(map(len, inputs))
    ids_BT = torch.tensor([[*ids] + [0] * (width - len(ids)) for ids in inputs])
    mask_BT = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in inputs])
    sent = {"input_ids": ids_BT} if bool(mask_BT.all()) else {"input_ids": ids_BT, "attention_mask": mask_BT}
    scored = [
        (b * width + len(ids) - len(tokens) + i, token, b)
        for b, (ids, row) in enumerate(zip(inputs, targets, strict=True))
        for tokens in row
        for i, token in enumerate(tokens)
    ]
    index_N, target_N, row_N = (move(x, device) for x in torch.tensor(scored).T.contiguous())
    return DeviceBatch(
        inputs={name: move(x, device) for name, x in sent.items()},
        index_N=index_N,
        target_N=target_N,
        loss=Tokens(row_N, len(inputs), len(scored)),
        token_count=len(scored),
    )
