"""NLL of many rows of very different lengths, in few passes over the weights.

Rows are sorted by length, so that batches need little padding, and put into batches of at most `batch_tokens` tokens,
padding included, the longest first, so that a lack of memory shows at once. If units are streamed, `passes` batches go
through the model in lockstep. With W bytes of streamed weights and T tokens in all,

    bytes over the link  =  W * ceil(T / (batch_tokens * passes))         not  W * rows

Results are returned in the order of the rows. Results that are not finite are an error; not_finite names the likely
cause. Legend: R rows of the whole set, B rows of a batch, T positions.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from keyhole.data.batches import collate
from keyhole.data.dataset import Sample
from keyhole.errors import NonFinite
from keyhole.model.model import Model
from keyhole.model.weights.saved_files import first_bad_tensor

BATCH_TOKENS = 4096
PASSES = 4

Groups = list[list[list[int]]]  # row indices of the batches that go through the model together
Found = list[tuple[torch.Tensor, torch.Tensor]]
Watch = Callable[[Groups], Iterable[list[list[int]]]]  # iterates over the groups, with a progress bar


def score_rows(model: Model, rows: Sequence[Sample], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(nll_R float64, count_R int64) on the host: summed NLL and number of trained tokens of each row. options: of
    `evaluated`."""
    nll_R = torch.zeros(len(rows), dtype=torch.float64)
    count_R = torch.zeros(len(rows), dtype=torch.int64)

    def run(group: list[list[int]]) -> Found:
        found: Found = model.nll([collate([rows[i] for i in batch], 0) for batch in group])
        return found

    own = []
    for batch, (nll_B, count_B) in evaluated(model, [len(row.input_ids) for row in rows], run, **options):
        nll_R[batch], count_R[batch] = nll_B.double().cpu(), count_B.cpu()
        own += batch
    of_all_ranks(model, own, nll_R, count_R)
    return nll_R, count_R


def class_logits(
    model: Model, rows: Sequence[Sample], pad_token_id: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits_RL float32, nll_R float64) of a classifier's rows, on the host. options: of `evaluated`."""
    logits_RL = torch.zeros(len(rows), model.config.num_labels)
    nll_R = torch.zeros(len(rows), dtype=torch.float64)

    def run(group: list[list[int]]) -> Found:
        batches = [collate([rows[i] for i in batch], pad_token_id) for batch in group]
        found: Found = model.logits(batches)
        return found

    own = []
    for batch, (logits_BL, nll_B) in evaluated(model, [len(row.input_ids) for row in rows], run, **options):
        logits_RL[batch], nll_R[batch] = logits_BL.cpu(), nll_B.double().cpu()
        own += batch
    of_all_ranks(model, own, logits_RL, nll_R)
    return logits_RL, nll_R


def evaluated(
    model: Model,
    lengths: Sequence[int],
    run: Callable[[list[list[int]]], Found],
    *,
    batch_tokens: int = BATCH_TOKENS,
    passes: int = PASSES,
    watch: Watch = iter,
) -> Iterator[tuple[list[int], tuple[torch.Tensor, torch.Tensor]]]:
    """(indices of its rows, what `run` found) for every batch of this rank. watch: iterates over the groups of batches
    that go through a streamed model together, with a progress bar."""
    batches = plan_batches(lengths, batch_tokens)
    together = passes if model.engine.streamed else 1
    groups = [batches[i : i + together] for i in range(0, len(batches), together)]
    own = model.ranks.share(groups)
    for group in watch(own):
        yield from zip(group, run(group), strict=True)
    most = -(-len(groups) // model.ranks.size)
    for group in groups[:1] * (most - len(own)) if model.sharded else ():  # visits are collectives of all ranks
        run(group)


def of_all_ranks(model: Model, own: list[int], *found: torch.Tensor) -> None:
    """Fills in the rows that other ranks have computed. own: the rows of this rank."""
    if not model.ranks.several:
        return
    rows = torch.tensor(own, dtype=torch.int64)
    for theirs, *values in model.ranks.objects((rows, *(x[rows] for x in found))):
        for x, value in zip(found, values, strict=True):
            x[theirs] = value


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


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of the rows of each batch, the longest first; a row longer than batch_tokens is a batch of its own."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > batch_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches
