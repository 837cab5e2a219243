"""One host copy of streamed weights per machine."""

from pathlib import Path
from typing import Any

import torch

from keyhole.ranks import Ranks
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
