"""Several ranks as threads of one process, of which one runs at a time: what processes compute, without their start.

They take turns at every exchange, in the order of ranks, so a run is the same each time.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from keyhole.machine.held import not_alone
from keyhole.plan import fit
from keyhole.ranks import Ranks
from tests.ranks.cases import CASES, results
from tests.ranks.test_gradients import assert_same_numbers

T = TypeVar("T")


class Thread(Ranks):
    """A rank among others of this process; `said` and the baton are shared by all of them."""

    def __init__(self, rank: int, said: list[Any], baton: threading.Condition, turn: list[int]) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = len(said)
        self.neighbours, self.has_neighbours = range(self.size), self.size > 1
        self.said, self.baton, self.turn = said, baton, turn

    def take_turns(self) -> None:
        """Lets all others come as far as this."""
        self.turn[0] = (self.rank + 1) % self.size
        self.baton.notify_all()
        with not_alone():
            came = self.baton.wait_for(lambda: self.turn[0] in (self.rank, -1), timeout=60)
        if not came or self.turn[0] == -1:
            raise RuntimeError("another rank has failed, or makes other calls")

    def objects(self, x: T) -> list[T]:
        self.said[self.rank] = x
        self.take_turns()
        found = list(self.said)
        self.take_turns()
        return found

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.objects(x.clone()))

    def in_order(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        left, found = list(self.objects(x.clone())), []
        for count in counts:
            for rank in range(self.size):
                own = (rank + 1) * count // self.size - rank * count // self.size
                found.append(left[rank][:own])
                left[rank] = left[rank][own:]
        return torch.cat(found)

    def total(self, count: int) -> int:
        return sum(self.objects(count))

    def from_rank(self, rank: int, make: Callable[[], T]) -> T:
        return self.objects(make() if self.rank == rank else None)[rank]  # type: ignore[return-value]

    def gather_into(self, out: torch.Tensor, part: torch.Tensor) -> None:
        out.copy_(torch.cat(self.objects(part.clone())))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([each.float() for each in self.objects(x.clone())]).sum(0)

    def sum_of_parts(self, x: torch.Tensor) -> torch.Tensor:
        return self.sum(x).chunk(self.size)[self.rank].clone()

    def barrier(self) -> None:
        self.objects(None)


def together(size: int, run: Callable[[Ranks], T]) -> list[T]:
    """What run(ranks) returns on every rank."""
    found: list[Any] = [None] * size
    said, baton, turn, errors = [None] * size, threading.Condition(), [0], list[BaseException]()

    def live(rank: int) -> None:
        with baton:
            baton.wait_for(lambda: turn[0] in (rank, -1))
            try:
                found[rank] = run(Thread(rank, said, baton, turn)) if turn[0] != -1 else None
                turn[0] = rank + 1 if turn[0] != -1 else -1
            except BaseException as error:
                errors.append(error)
                turn[0] = -1
            baton.notify_all()

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def assert_as_alone(name: str) -> None:
    """A case of tests/ranks/cases.py on its ranks gives the losses, norms and weights of one process."""
    case, usual = CASES[name], fit.UNIT_BYTES
    alone = results(case, Ranks())
    try:
        ours = together(case.size, lambda ranks: results(case, ranks))
    finally:
        fit.UNIT_BYTES = usual
    assert_same_numbers(name, ours, alone)
