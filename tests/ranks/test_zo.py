"""zo on several ranks has the bits of one process: twelve families, tied heads and mixtures of experts among them."""

from pathlib import Path

import pytest
import torch

from keyhole.ranks import Ranks
from tests.ranks.launch import Launch
from tests.ranks.workers import write_zo_results, zo_results


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_one_on_twelve_families(tmp_path: Path) -> None:
    """Three micro-batches of different sizes over two ranks, streamed: losses and weights of both ranks are those of
    one process with resident weights; of every estimator, and of a search for a rate, too."""
    launch = Launch(2, write_zo_results, tmp_path)
    torch.set_num_threads(1)
    alone = zo_results(Ranks())
    assert launch.end() == [0, 0], launch.printed
    for rank in range(2):
        ours = torch.load(tmp_path / f"{rank}.pt")
        assert ours.keys() == alone.keys()
        different = [
            f"{name}: {key}"
            for name in alone
            for key in alone[name]
            if not torch.equal(ours[name][key], alone[name][key])
        ]
        assert not different, different
