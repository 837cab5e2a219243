"""One host copy of streamed weights per machine, and what all its ranks must have alike."""

from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.ranks import Ranks
from tests.model.decoders import config
from tests.ranks.launch import Launch
from tests.ranks.workers import SHARED, run_shared, shared_results

TOLD = {"shared", "block_bytes", "pss_bytes"}


def assert_shared(ours: list[dict[str, Any]], alone: dict[str, dict[str, Any]]) -> None:
    """Every rank has the bits of one process in every case, and shares its blocks."""
    for case, one in alone.items():
        for found in (rank[case] for rank in ours):
            different = [key for key in one.keys() - TOLD if not torch.equal(found[key], one[key])]
            assert not different and len(found["shared"]) > 1 and one["shared"] == [], (case, different)


def test_ranks_that_share_homes_have_the_bits_of_one(tmp_path: Path) -> None:
    """Five steps, so that homes are rewritten in between, and a flush: losses, weights and counts of both ranks are
    those of one process, dense, of low rank, packed, with experts of which each rank meets others; and the blocks are
    in memory once."""
    launch = Launch(2, shared_results, tmp_path)
    torch.set_num_threads(1)
    alone = {case: run_shared(Ranks(), case=case) for case in SHARED}
    assert launch.end() == [0, 0], launch.printed
    ours = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert_shared(ours, alone)
    block_bytes = alone["dense"]["block_bytes"]
    assert sum(found["dense"]["pss_bytes"] for found in ours) <= 1.05 * block_bytes + 8192 and block_bytes > 100_000


class Two(Ranks):
    """Two ranks of a machine, of whom nothing is asked."""

    size = local_size = 2
    has_neighbours = True


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
