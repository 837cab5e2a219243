"""One host copy of streamed weights per machine."""

from pathlib import Path

import torch

from keyhole.ranks import Ranks
from tests.ranks.launch import Launch
from tests.ranks.workers import run_shared, shared_results


def test_ranks_that_share_homes_have_the_bits_of_one(tmp_path: Path) -> None:
    """Five steps, so that homes are rewritten in between, and a flush: losses, weights and counts of both ranks are
    those of one process, and the blocks are in memory once."""
    launch = Launch(2, shared_results, tmp_path)
    torch.set_num_threads(1)
    alone = run_shared(Ranks())
    assert launch.end() == [0, 0], launch.printed
    ours = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    told = {"shared", "block_bytes", "pss_bytes"}
    for found in ours:
        different = [key for key in alone.keys() - told if not torch.equal(found[key], alone[key])]
        assert not different, different
        assert len(found["shared"]) > 1 and alone["shared"] == []
    assert sum(found["pss_bytes"] for found in ours) <= 1.05 * alone["block_bytes"] + 8192
    assert alone["block_bytes"] > 100_000
