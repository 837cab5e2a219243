"""Evaluation split over ranks, which are threads here, gives the numbers of one."""

from pathlib import Path

import torch

from keyhole.ranks import Ranks
from tests.ranks.threads import together
from tests.ranks.workers import evaluation_results


def test_ranks_share_rows_and_questions(tiny_model: Path) -> None:
    """Three ranks, more than some batches, with all weights or parts of them: every rank has all scores and answers, to
    the bit."""
    alone = evaluation_results(Ranks(), str(tiny_model))
    for everything in together(3, lambda ranks: evaluation_results(ranks, str(tiny_model))):
        for method, ours in everything.items():
            theirs = alone[method]
            assert torch.equal(ours["nll"], theirs["nll"]) and torch.equal(ours["count"], theirs["count"]), method
            assert ours["answers"] == theirs["answers"] and ours["held out"] == theirs["held out"], method
