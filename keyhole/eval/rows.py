"""NLL of many rows of very different lengths, in few passes over the weights.

Rows are sorted by length, so that batches need little padding, and put into batches of at most `batch_tokens` tokens,
padding included, the longest first, so that a lack of memory shows at once. If units are streamed, `passes` batches go
through the model in lockstep. With W bytes of streamed weights and T tokens in all,

    bytes over the link  =  W * ceil(T / (batch_tokens * passes))         not  W * rows

Results are returned in the order of the rows. Results that are not finite are an error; not_finite names the likely
cause. Legend: R rows of the whole set, B rows of a batch, T positions.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from keyhole.data.batches import collate
from keyhole.data.dataset import Sample
from keyhole.errors import NonFinite
from keyhole.model.model import Model
from keyhole.model.weights.save import first_bad_tensor

BATCH_TOKENS = 4096
PASSES = 4

Groups = list[list[list[int]]]  # row indices of the batches that go through the model together
Watch = Callable[[Groups], Iterable[list[list[int]]]]  # iterates over the groups, with a progress bar
Value = TypeVar("Value")


def score_rows(model: Model, rows: Sequence[Sample], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(nll_R float64, count_R int64) on the host: summed NLL and number of trained tokens of each row. options: of
    `by_row`."""

    def run(group: list[list[int]]) -> list[list[tuple[float, int]]]:
        found = model.nll([collate([rows[i] for i in batch], 0) for batch in group])
        return [list(zip(nll_B.tolist(), count_B.tolist(), strict=True)) for nll_B, count_B in found]

    found = by_row(model, [len(row.input_ids) for row in rows], run, **options)
    return torch.tensor([nll for nll, _ in found], dtype=torch.float64), torch.tensor([n for _, n in found]).long()


def class_logits(
    model: Model, rows: Sequence[Sample], pad_token_id: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits_RL float32, nll_R float64) of a classifier's rows, on the host. options: of `by_row`."""

    def run(group: list[list[int]]) -> list[list[tuple[list[float], float]]]:
        found = model.logits([collate([rows[i] for i in batch], pad_token_id) for batch in group])
        return [list(zip(logits_BL.tolist(), nll_B.tolist(), strict=True)) for logits_BL, nll_B in found]

    found = by_row(model, [len(row.input_ids) for row in rows], run, **options)
    return torch.tensor([logits for logits, _ in found]), torch.tensor([nll for _, nll in found], dtype=torch.float64)


def by_row(
    model: Model,
    lengths: Sequence[int],
    run: Callable[[list[list[int]]], list[list[Value]]],
    *,
    batch_tokens: int = BATCH_TOKENS,
    passes: int = PASSES,
    watch: Watch = iter,
) -> list[Value]:
    """What `run` finds for every row, in order; it gets the batches that go through a streamed model together. Several
    ranks share the groups. watch: iterates over the groups, with a progress bar."""
    batches = plan_batches(lengths, batch_tokens)
    together = passes if model.engine.streamed else 1
    groups = [batches[i : i + together] for i in range(0, len(batches), together)]
    own, found = model.ranks.share(groups), dict[int, Value]()
    for group in watch(own):
        for batch, values in zip(group, run(group), strict=True):
            found |= zip(batch, values, strict=True)
    most = -(-len(groups) // model.ranks.size)
    for group in groups[:1] * (most - len(own)) if model.sharded else ():  # visits are collectives of all ranks
        run(group)
    for theirs in model.ranks.objects(found) if model.ranks.several else ():
        found |= theirs
    return [found[i] for i in range(len(lengths))]


def not_finite(model: Model, what: str) -> NonFinite:
    """The error for outputs that are NaN or infinite: because of such a weight, or of numbers too large for the
    dtype."""
    dtype, bad = str(model.dtype).removeprefix("torch."), first_bad_tensor(model.named_tensors())
    wider = "" if dtype == "float32" else f", or {dtype} is too narrow for it: try dtype=float32"
    if bad:
        return NonFinite(
            f"{what}: the weights are damaged, {bad} has NaN or infinity in it (the first that does){wider}; go back "
            "to a good checkpoint or fetch the model anew"
        )
    return NonFinite(f"{what}, though all weights are finite: the weights are damaged in another way{wider}")


def plan_batches(
    lengths: Sequence[int], batch_tokens: int, more: int = 0, most_rows: int | None = None
) -> list[list[int]]:
    """Indices of the rows of each batch, the longest first; a row longer than batch_tokens is a batch of its own. more:
    tokens that every row will get; most_rows: of a batch."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rows = len(batches[-1]) + 1 if batches else 1
        if not batches or rows * (lengths[batches[-1][0]] + more) > batch_tokens or rows > (most_rows or rows):
            batches.append([])
        batches[-1].append(i)
    return batches
