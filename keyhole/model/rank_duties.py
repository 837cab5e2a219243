"""What one of several ranks does for a model that they train together (keyhole/ranks).

    homes that the ranks of a machine share    exactly one rank writes each of them (`writes_home`); while homes are
                                               rewritten outside of a step, no rank uploads them (`rewriting_shared`)
    groups of batches to evaluate              each rank sweeps its share of them (`evaluation_share`)
    batches to generate                        each rank answers its share of them (`generation_ranks`)

If the model is sharded, every visit of a unit is a collective: all ranks must make the same number of sweeps. So a rank
with fewer groups evaluates a spare one, whose result is dropped; and because the lengths of answers are unknown, every
rank generates all batches. For a single process all of this is nothing: it writes every home and has every group.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from keyhole.ranks import Ranks

if TYPE_CHECKING:
    from keyhole.model.model import Model

T = TypeVar("T")


def writes_home(model: "Model", page: int) -> bool:
    """Whether this rank writes the home of a unit; for a home that several ranks share, exactly one does."""
    return page not in model.engine.shared or page % model.ranks.local_size == model.ranks.local_rank


@contextmanager
def rewriting_shared(model: "Model") -> Iterator[None]:
    """A context in which shared homes are rewritten, each by its one writer, while no rank uploads them. Entered by
    all ranks."""
    if not model.engine.shared:
        yield
        return
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    model.engine.invalidate(everywhere=True)
    model.ranks.barrier()
    yield
    model.engine.wait_for_homes()
    model.ranks.barrier()
    model.engine.invalidate(everywhere=True)


def evaluation_share(model: "Model", groups: Sequence[T]) -> tuple[list[T], list[T]]:
    """This rank's share of the groups to evaluate, one sweep per group; and groups that it runs only to match the
    collectives of ranks that have one group more, if the model is sharded."""
    own = model.ranks.share(groups)
    most = -(-len(groups) // model.ranks.size)
    return own, list(groups[:1]) * (most - len(own)) if model.sharded else []


def generation_ranks(model: "Model") -> Ranks:
    """The ranks that share the batches of a generation: all of them. If the model is sharded, every visit of a unit is
    a collective and the lengths of answers are unknown, so each rank runs all batches."""
    return Ranks() if model.sharded else model.ranks
