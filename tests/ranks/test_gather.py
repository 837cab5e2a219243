"""Ranks of a machine that upload a part of every unit each, and gather the rest."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole.config.schema import OffloadConfig
from keyhole.errors import UserError
from keyhole.ranks import Ranks
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
    settings = ENDLESS | {"placement": "stream", "offload": OffloadConfig(gather="always")}
    launch = Launch(2, dying_train, [written(tmp_path, make("out", **settings))])
    assert launch.end() == [1, -signal.SIGKILL], launch.printed
    said = launch.printed[0]
    assert "uploads: each of 2 ranks takes 1/2 of a unit over its link and gathers the rest" in said, said
    assert "step     2/" in said and "rank 1 (" in said and "has died" in said, said


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
    monkeypatch.setattr(Two, "objects", lambda self, x: [x, frozenset()])
    how = {"init": "random", "device": "cpu", "placement": "stream", "workload": keyhole.Workload("zo", tokens=8)}
    with pytest.raises(UserError, match="gpu_memory: ranks 0 and 1 would stream different units"):
        keyhole.load(config("llama"), ranks=Two(), **how)


def test_gather_is_one_of_three_words() -> None:
    with pytest.raises(UserError, match="gather='sometimes': choose auto, always, never"):
        keyhole.load(config("llama"), init="random", gather="sometimes")
