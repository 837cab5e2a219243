"""The operations between ranks, and their trivial versions for a single process.

    share(items)        this rank's part of a list, in order: items[r n / N : (r + 1) n / N]
    in_order(x, counts) one number per item of lists that were shared, put together again
    gather(x)           the tensors of all ranks, [N, ...], in the order of ranks
    total(count)        the sum of an integer over all ranks, on the host
    objects(x)          any (picklable) object of every rank
    from_leader(make)   the result of `make` on the leader, on all ranks; only the leader calls it. from_rank: any rank
    gather_into, sum_of_parts, sum    collectives of large tensors, for sharding
    barrier()           returns when every rank has called it

All ranks must make every call except `share`, in the same order. This class is a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Ranks:
    """A single process."""

    rank, size = 0, 1
    local_rank, local_size, machine = 0, 1, "0"
    neighbours: Sequence[int] = (0,)  # the ranks of this machine
    has_neighbours = False  # whether some machine has several ranks; the same on all of them
    limit_s = 60.0

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.size > 1

    def share(self, items: Sequence[T]) -> list[T]:
        """This rank's consecutive part of the items; empty if there are fewer items than ranks."""
        begin, end = (r * len(items) // self.size for r in (self.rank, self.rank + 1))
        return list(items[begin:end])

    @property
    def orphaned(self) -> bool:
        """Whether torchrun, which started this rank, is gone."""
        return False

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[N, *shape of x], on the device of x."""
        return x[None]

    def in_order(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """One number per item, for the items of several lists of which each rank has its share, list by list; returns
        the numbers of all ranks, in the order of the unshared lists. counts: the lengths of the lists."""
        return x

    def total(self, count: int) -> int:
        return count

    def objects(self, x: T) -> list[T]:
        return [x]

    def from_leader(self, make: Callable[[], T]) -> T:
        return self.from_rank(0, make)

    def from_rank(self, rank: int, make: Callable[[], T]) -> T:
        return make()

    def gather_into(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """out [N k] <- the parts [k] of all ranks, side by side."""
        out.copy_(part)

    def sum_of_parts(self, x: torch.Tensor) -> torch.Tensor:
        """x [N k] on every rank -> this rank's k elements, summed over the ranks in float32, in their order."""
        return x.float()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks, the same bits on all of them; float32."""
        return x.float()

    def barrier(self) -> None:
        pass

    def set_limit(self, limit_s: float) -> None:
        """Seconds without a heartbeat after which a rank counts as dead."""

    def device(self, asked: str | None) -> str | None:
        return asked

    def describe(self, device: Any) -> list[str]:
        return []

    def close(self) -> None:
        pass
