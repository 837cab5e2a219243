"""Evaluation split over ranks gives the numbers of one."""

from pathlib import Path

import torch

from keyhole.ranks import Ranks
from tests.ranks.launch import Launch
from tests.ranks.workers import evaluation_results, write_evaluation


def test_ranks_share_rows_and_questions(tiny_model: Path, tmp_path: Path) -> None:
    """Three ranks, more than some batches, with all weights or parts of them: every rank has all scores and answers, to
    the bit."""
    launch = Launch(3, write_evaluation, tmp_path, str(tiny_model))
    torch.set_num_threads(1)
    alone = evaluation_results(Ranks(), str(tiny_model))
    assert launch.end() == [0, 0, 0], launch.printed
    for rank in range(3):
        everything = torch.load(tmp_path / f"{rank}.pt")
        for method, ours in everything.items():
            theirs = alone[method]
            assert torch.equal(ours["nll"], theirs["nll"]) and torch.equal(ours["count"], theirs["count"]), method
            assert ours["answers"] == theirs["answers"] and ours["held out"] == theirs["held out"], method
