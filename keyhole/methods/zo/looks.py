"""The looks of one step: the perturbed points at which its loss is evaluated, each on all rows (estimators.py).

Passes are numbered by look, and within a look by batch:

    look 0          look 1          look 2 ...        pair 0 is looks 0 and 1, written in one pass over a unit's weights
    0 .. m - 1      m .. 2 m - 1    2 m ..

Every rank has its share of the batches (keyhole/ranks), which may be empty.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from keyhole.methods.zo.estimators import Pair
from keyhole.model.batch import Batch, DeviceBatch
from keyhole.model.model import Model
from keyhole.model.objective import Candidates, loss_of
from keyhole.ranks import Ranks


@dataclass(frozen=True)
class Looks:
    """The perturbed points at which a step evaluates its loss, and its batches."""

    pairs: list[Pair]
    batches: list[DeviceBatch]  # those of this rank
    loss_count: int  # the number that the loss of the step is divided by
    count: int  # number of batches over all ranks

    @property
    def looks(self) -> int:
        """The number of looks."""
        return sum(pair.looks for pair in self.pairs)

    @cached_property
    def passes(self) -> list[DeviceBatch]:
        """The batch of every pass."""
        return self.batches * self.looks

    @cached_property
    def visits(self) -> list[tuple[int, Pair, list[range]]]:
        """(number, pair, passes at each of its looks); none on a rank without batches."""
        found, begin, size = [], 0, len(self.batches)
        for p, pair in enumerate(self.pairs if size else ()):
            found.append((p, pair, [range(begin + i * size, begin + (i + 1) * size) for i in range(pair.looks)]))
            begin += pair.looks * size
        return found


def look_at(model: Model, pairs: list[Pair], batches: list[Batch], ranks: Ranks) -> Looks:
    """The looks of a step."""
    sent = model.send(ranks.share(batches), **send_options(batches))
    return Looks(pairs, sent, ranks.total(sum(batch.loss.count for batch in sent)), len(batches))


def send_options(batches: list[Batch]) -> dict[str, bool]:
    """Options of Model.send: candidates may share rows or be joined (model/rows.py)."""
    by_candidates = any(loss_of(batch) is Candidates for batch in batches)
    return {"shares": by_candidates, "joins": by_candidates}


# -- halves of a step's rows (rate_search.py) --------------------------------------------------------------------------


def sample_count(batch: Batch) -> int:
    """The number of questions of a batch; of its rows, if it has none."""
    return int(batch["question"][-1]) + 1 if "question" in batch else int(batch["input_ids"].shape[0])


def piece(batch: Batch, begin: int, end: int) -> Batch:
    """Samples [begin, end) of a batch: rows, or questions with all their candidates."""
    if "question" not in batch:
        return {name: x[begin:end] for name, x in batch.items()}
    question_B = batch["question"]
    first, last = torch.searchsorted(question_B, torch.tensor([begin, end], device=question_B.device)).tolist()
    return {name: x[first:last] - begin if name == "question" else x[first:last] for name, x in batch.items()}


def halved(batches: list[Batch]) -> tuple[list[Batch], list[Batch]]:
    """The samples of a step in two halves, each a list of pieces of micro-batches; the first has the odd one."""
    halves: tuple[list[Batch], list[Batch]] = ([], [])
    left = -(-sum(map(sample_count, batches)) // 2)  # of the first half
    for batch in batches:
        size = sample_count(batch)
        cut = min(max(left, 0), size)
        left -= size
        for half, (begin, end) in zip(halves, ((0, cut), (cut, size)), strict=True):
            if begin < end:
                half.append(batch if (begin, end) == (0, size) else piece(batch, begin, end))
    return halves
