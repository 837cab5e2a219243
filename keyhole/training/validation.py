"""Loss and perplexity on held-out data, exactly as the training loss is defined.

    eval_loss = sum of NLL over all trained tokens of the set / their number      perplexity = exp(eval_loss)

Sums are added in float64 on the host. When units are streamed, up to EVAL_PASSES batches go through the model together,
as many as the memory plan has room for: they share every upload, and the result does not depend on the grouping.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from keyhole.model.batch import Batch
from keyhole.model.model import Model

EVAL_PASSES = 8


def evaluate(model: Model, batches: Iterable[Batch], stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
    """{"eval_loss", "perplexity", "eval_tokens"} over all batches; None when `stop` said so midway."""
    nll, tokens = 0.0, 0
    for group in _groups(batches, model.placed.evaluation_passes(model.layout, EVAL_PASSES)):
        if stop():
            return None
        for nll_B, count_B in model.nll(group):
            nll += float(nll_B.double().sum())
            tokens += int(count_B.sum())
    loss = nll / max(1, tokens)
    return {"eval_loss": loss, "perplexity": math.exp(min(loss, 700.0)), "eval_tokens": tokens}


def _groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        yield group
