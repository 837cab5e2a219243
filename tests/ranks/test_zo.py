"""zo on two and four ranks has the bits of one process: twelve families, tied and with experts among them."""

from pathlib import Path

import pytest
import torch

from keyhole.ranks import Ranks
from tests.matrix import in_every_run
from tests.ranks.launch import Launch
from tests.ranks.workers import ZO_CASES, write_zo_results, zo_results

SIZES = (2, 4)


@in_every_run(lambda part: part == "of every kind")
@pytest.mark.slow
@pytest.mark.parametrize("part", ZO_CASES)
def test_ranks_have_the_bits_of_one_process_on_twelve_families(part: str, tmp_path: Path) -> None:
    """Five micro-batches of different sizes over two or four ranks, streamed: losses and weights of all ranks are those
    of one process with resident weights; of every estimator, too."""
    launches = [Launch(size, write_zo_results, tmp_path, SIZES, part) for size in SIZES]
    torch.set_num_threads(1)
    alone, seen = zo_results(Ranks(), SIZES, part), set()
    for size, launch in zip(SIZES, launches, strict=True):
        assert launch.end() == [0] * size, launch.printed
        for rank in range(size):
            ours = torch.load(tmp_path / f"{size} {rank}.pt")
            seen |= ours.keys()
            pairs = [(name, key) for name in ours for key in alone[name]]
            different = [pair for pair in pairs if not torch.equal(ours[pair[0]][pair[1]], alone[pair[0]][pair[1]])]
            assert not different, (size, rank, different)
    assert seen == alone.keys()
