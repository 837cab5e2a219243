"""Ranks of a machine that upload a part of every unit each, and gather the rest."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.offload.transports import GatheringEngine
from keyhole.ranks import Ranks
from tests.matrix import in_every_run
from tests.model.decoders import config
from tests.ranks.gathered import CASES, SETTINGS, dying_train, gathered_results, run
from tests.ranks.launch import Launch, written
from tests.ranks.test_failures import ENDLESS
from tests.training.runs import Make


def assert_gathered(ours: list[dict[str, Any]], alone: dict[str, dict[str, Any]], machines: list[int]) -> None:
    """Every case of these ranks, so many of them on each machine, has the bits of one process; and every byte of a
    machine's shared units crossed one of its links, where without gathers it crosses all."""
    for found, neighbours in zip(ours, [count for count in machines for _ in range(count)], strict=True):
        assert (found.pop("received") > 0) == (neighbours > 1)
        for name, case in found.items():
            bits, theirs = case["bits"], alone[name.partition(",")[0]]["bits"]
            assert bits.keys() == theirs.keys()
            assert not [key for key in bits if not torch.equal(bits[key], theirs[key])], name
            assert case["gathers"] == ours[0][name]["gathers"] and case["gathers"] >= name.endswith("always")
            assert ("GB/s by parts" if name.endswith("auto") else "offload.gather=always") in case["said"][0]
    for i, count in enumerate(machines):
        dense = [found["dense, always"] for found in ours[sum(machines[:i]) :][:count]]
        assert sum(case["up"] - case["own"] for case in dense) == dense[0]["shared"] > 0


@in_every_run(lambda machines: len(machines) == 1)
@pytest.mark.parametrize(("machines", "cases"), [([3], CASES), ([1, 2], ["dense, always"])])
def test_gathered_uploads_have_the_bits_of_whole_ones(tmp_path: Path, machines: list[int], cases: list[str]) -> None:
    """Three ranks, into whose parts no unit divides: dense, of low rank, packed, experts of which each rank meets
    others; and two machines, of which one has one rank and the other two."""
    size = sum(machines)
    launch = Launch(size, gathered_results, tmp_path, cases, machines)
    torch.set_num_threads(1)
    alone = {name: run(Ranks(), name, "auto") for name in SETTINGS if any(case.startswith(name) for case in cases)}
    assert launch.end() == [0] * size, launch.printed
    assert_gathered([torch.load(tmp_path / f"{size} {rank}.pt") for rank in range(size)], alone, machines)


def test_a_rank_that_dies_between_gathers_ends_the_others(make: Make, tmp_path: Path) -> None:
    """kill -9 in the middle of a sweep: the leader, which waits for its part, names it."""
    settings = ENDLESS | {"placement": "stream"}
    launch = Launch(2, dying_train, [written(tmp_path, make("out", **settings))])
    assert launch.end() == [1, -signal.SIGKILL], launch.printed
    said = launch.printed[0]
    assert "uploads: each of 2 ranks takes 1/2 of a unit over its link and gathers the rest" in said, said
    assert "step     2/" in said and "rank 1 (" in said and "has died" in said, said


class Crowd:
    """Two ranks on each of two machines, as threads: a call that not all of them make is noticed."""

    def __init__(self) -> None:
        self.barriers = {name: threading.Barrier(size, timeout=30) for name, size in (("0", 2), ("1", 2), ("all", 4))}
        self.said: list[Any] = [None] * 4


class InCrowd(Ranks):
    """One of them."""

    size, local_size = 4, 2

    def __init__(self, crowd: Crowd, rank: int) -> None:
        self.crowd, self.rank, self.local_rank, self.machine = crowd, rank, rank % 2, str(rank // 2)

    def objects(self, x: Any) -> list[Any]:
        return self._say("all", ("objects", x), range(4))

    def gather_on_machine(self, whole: torch.Tensor) -> None:
        first = 2 * int(self.machine)
        part = whole.chunk(2)[self.local_rank].clone()
        whole.copy_(torch.cat(self._say(self.machine, ("gather", part), range(first, first + 2))))

    def _say(self, who: str, words: tuple[str, Any], ranks: range) -> list[Any]:
        self.crowd.said[self.rank] = words
        self.crowd.barriers[who].wait()
        found = [self.crowd.said[rank] for rank in ranks]
        self.crowd.barriers[who].wait()
        assert {name for name, _ in found} == {words[0]}, found
        return [one for _, one in found]


@pytest.mark.parametrize("idle", [{2}, {0, 1}, {0, 2, 3}], ids=str)
def test_ranks_without_a_batch_gather_all_the_same(idle: set[int]) -> None:
    """In the first sweep, on one machine or both: no rank waits for them, and nobody asks anything."""
    crowd, homes = Crowd(), [torch.arange(700.0) + 1000 * page for page in range(5)]

    def live(rank: int) -> int:
        ranks = InCrowd(crowd, rank)
        options = {"slot_count": 2, "shared": frozenset(range(5))}
        engine = GatheringEngine(homes, set(range(5)), torch.device("cpu"), ranks, **options)
        engine.decide("always")
        for sweep in range(4):
            with engine.sweep("train", list(range(5)), of_all=True):
                for page in range(5) if sweep or rank not in idle else ():
                    assert torch.equal(engine.acquire(page, changes=False), homes[page])
                    engine.release(page)
        assert ranks.objects("end") == ["end"] * 4
        return len(engine.places)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(live, range(4))) == [5] * 4


class Two(Ranks):
    """Two ranks of a machine, of whom nothing is asked."""

    size = local_size = 2
    has_neighbours = True


@pytest.mark.parametrize(
    ("ranks", "method", "placement", "why"),
    [
        (Ranks(), "zo", "stream", "the only one on its machine"),
        (Two(), "lomo", "stream", "lomo shares out its units and gathers them already"),
        (Two(), "lora", "stream", "lora has no sweep that is the same on all ranks"),
        (Two(), "zo", "resident", "nothing is streamed"),
    ],
)
def test_what_cannot_gather_says_why(ranks: Ranks, method: str, placement: str, why: str) -> None:
    """offload.gather=always is refused where there is nothing to gather, and names the reason."""
    how = {"init": "random", "device": "cpu", "placement": placement, "workload": keyhole.Workload(method, tokens=8)}
    with pytest.raises(UserError, match=f"offload.gather: always .*{why}; use auto"):
        keyhole.load(config("llama"), gather="always", ranks=ranks, **how)


def test_ranks_that_would_stream_different_units_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share one copy of them."""
    monkeypatch.setattr(Two, "objects", lambda self, x: [x, (self.machine, x[1], frozenset())])
    how = {"init": "random", "device": "cpu", "placement": "stream", "workload": keyhole.Workload("zo", tokens=8)}
    with pytest.raises(UserError, match="gpu_memory: ranks 0 and 1 would stream different units"):
        keyhole.load(config("llama"), ranks=Two(), **how)


def test_machines_that_would_not_all_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shared is changed by all ranks together, so all of them must have something to share; a rank alone on its
    machine has."""
    how = {"init": "random", "device": "cpu", "placement": "stream", "workload": keyhole.Workload("zo", tokens=8)}
    monkeypatch.setattr(Two, "size", 3)
    monkeypatch.setattr(Two, "objects", lambda self, x: [x, ("0", *x[1:]), ("1", x[1], frozenset())])
    with pytest.raises(UserError, match="ranks 0 and 2 would stream different units.*set gpu_memory"):
        keyhole.load(config("llama"), ranks=Two(), **how)


def test_ranks_that_shard_have_equally_many_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload takes all ranks: one with more slots than others would ask for it earlier than they do."""
    monkeypatch.setattr(Two, "objects", lambda self, x: [x, x - 1 if isinstance(x, int) else x])
    how = {"init": "random", "device": "cpu", "placement": "stream", "workload": keyhole.Workload("lomo", tokens=8)}
    assert keyhole.load(config("llama"), ranks=Two(), slot_count=4, **how).engine.slot_count == 3


def test_ranks_that_would_cut_other_units_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They exchange them whole."""
    monkeypatch.setattr(Two, "objects", lambda self, x: [x, (x[0], x[1][:-1], x[2]) if isinstance(x, tuple) else x])
    how = {"init": "random", "device": "cpu", "placement": "stream", "workload": keyhole.Workload("lomo", tokens=8)}
    with pytest.raises(UserError, match="gpu_memory: ranks would cut the model into different units"):
        keyhole.load(config("llama"), ranks=Two(), **how)


def test_gather_is_one_of_three_words() -> None:
    with pytest.raises(UserError, match="gather='sometimes': choose auto, always, never"):
        keyhole.load(config("llama"), init="random", gather="sometimes")
