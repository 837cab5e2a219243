"""The looks of one step: the perturbed points at which its loss is evaluated, and on which rows (estimators/base.py).

Passes are numbered by look, and within a look by batch:

    look 0          look 1          look 2 ...        pair 0 is looks 0 and 1, written in one pass over a unit's weights
    0 .. m - 1      m .. 2 m - 1    2 m ..

An estimator that splits has fewer and shorter batches per look: the pieces of one part of the rows.

Every rank has its share of the batches of each look (keyhole/ranks), which may be empty.
"""

from dataclasses import dataclass
from functools import cached_property

from keyhole.errors import warn
from keyhole.methods.zo.estimators.base import Estimator, Pair
from keyhole.methods.zo.parts import sample_count, split
from keyhole.model.batch import Batch, DeviceBatch
from keyhole.model.model import Model
from keyhole.model.objective import PER_ROW
from keyhole.ranks import Ranks


@dataclass(frozen=True)
class Looks:
    """The perturbed points at which a step evaluates its loss, and the batches for each of them."""

    pairs: list[Pair]
    batches: list[list[DeviceBatch]]  # by look, those of this rank
    loss_count: int  # the number that the loss of the step is divided by
    counts: list[int]  # number of batches of each look, over all ranks

    @property
    def first(self) -> int:
        """The number of the first pair that is visited: at this pair a unit arrives."""
        return self.visits[0][0]

    @cached_property
    def passes(self) -> list[DeviceBatch]:
        """The batch of every pass."""
        return [batch for batches in self.batches for batch in batches]

    @cached_property
    def visits(self) -> list[tuple[int, Pair, list[range]]]:
        """(number, pair, passes at each of its looks) of the pairs that have passes: with fewer rows than directions,
        the last pairs have none."""
        found, counts, begin = [], iter(map(len, self.batches)), 0
        for p, pair in enumerate(self.pairs):
            passes = []
            for _ in range(pair.looks):
                count = next(counts)
                passes.append(range(begin, begin + count))
                begin += count
            found.append((p, pair, passes))
        return [visit for visit in found if visit[2][0]]


def look_at_all(model: Model, pairs: list[Pair], batches: list[Batch], ranks: Ranks) -> Looks:
    """The looks of a step that evaluates each of them on all rows."""
    sent = model.send(ranks.share(batches), **send_options(batches))
    count = ranks.total(sum(batch.loss_count for batch in sent))
    looks = sum(pair.looks for pair in pairs)
    return Looks(pairs, [sent] * looks, count, [len(batches)] * looks)


def look_at_parts(model: Model, estimator: Estimator, batches: list[Batch], ranks: Ranks) -> Looks:
    """The looks of a step that evaluates each pair on its own part of the rows."""
    parts = split(batches, estimator.directions)
    sent = [model.send(ranks.share(part), **send_options(part)) for part in parts]
    count = ranks.total(sum(batch.loss_count for part in sent for batch in part))
    counts = [len(part) for part in parts for _ in range(2)]
    return Looks(estimator.pairs, [part for part in sent for _ in range(2)], count, counts)


def warn_of_unused(directions: int, batches: list[Batch]) -> None:
    """A warning if a step has fewer rows than directions, so that the last directions have none."""
    rows = sum(map(sample_count, batches))
    if rows < directions:
        what = "question" if "question" in batches[0] else "row"
        warn(
            f"zo.directions: grzo gives each of its {directions} directions a part of a step's {what}s, and this step "
            f"has {rows}: the last {directions - rows} are not used. Set zo.directions={rows}, or raise batch_size or "
            "gradient_accumulation_steps"
        )


def send_options(batches: list[Batch]) -> dict[str, bool]:
    """Options of Model.send: candidates may share rows (model/shared_rows.py), and their rows be joined
    (model/joined_rows.py)."""
    by_candidates = any(PER_ROW[0] in batch for batch in batches)
    return {"shares": by_candidates, "joins": by_candidates}
