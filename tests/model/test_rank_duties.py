"""What each rank does for a model: one writer per home, and shares that cover all groups."""

from types import SimpleNamespace
from typing import Any

import pytest

from keyhole.model.rank_duties import evaluation_share, generation_ranks, writes_home
from keyhole.ranks import Ranks


def rank_of(rank: int, size: int, sharded: bool = False, shared: tuple[int, ...] = ()) -> Any:
    """What the functions read of a model on one of `size` ranks of a machine."""
    ranks = Ranks()
    ranks.rank = ranks.local_rank = rank
    ranks.size = ranks.local_size = size
    return SimpleNamespace(ranks=ranks, sharded=sharded, engine=SimpleNamespace(shared=set(shared)))


@pytest.mark.parametrize("sharded", [False, True])
def test_every_group_is_evaluated_once_and_shards_sweep_equally_often(sharded: bool) -> None:
    """Spare groups are added only if every sweep is a collective; then all ranks make as many."""
    for size in range(1, 5):
        for count in range(1, 7):
            groups = [f"group {i}" for i in range(count)]
            shares = [evaluation_share(rank_of(rank, size, sharded), groups) for rank in range(size)]
            assert [group for own, _ in shares for group in own] == groups
            sweeps = {len(own) + len(spare) for own, spare in shares}
            assert len(sweeps) == 1 if sharded else all(spare == [] for _, spare in shares)


def test_a_shared_home_has_one_writer() -> None:
    """Every rank writes the homes that it has alone; of those that it shares, its own part."""
    ranks = [rank_of(rank, 3, shared=(1, 2, 3, 4)) for rank in range(3)]
    assert all(writes_home(rank, 0) for rank in ranks)
    assert [sum(writes_home(rank, page) for rank in ranks) for page in (1, 2, 3, 4)] == [1, 1, 1, 1]


def test_every_rank_generates_everything_if_the_model_is_sharded() -> None:
    """Otherwise each answers its share."""
    assert generation_ranks(rank_of(1, 2, sharded=True)).share("abcd") == list("abcd")
    assert generation_ranks(rank_of(1, 2)).share("abcd") == ["c", "d"]
