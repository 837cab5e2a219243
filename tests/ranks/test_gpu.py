"""Two ranks on one GPU, over gloo: what the CPU tests show, with streams, page-locked memory and kernels."""

from pathlib import Path

import pytest
import torch

from keyhole.ranks import Ranks
from tests.ranks.launch import Launch
from tests.ranks.test_lomo import assert_same_numbers
from tests.ranks.workers import lomo_results, run_shared, shared_results, write_lomo_results

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLD = {"shared", "block_bytes", "pss_bytes"}


def test_shared_homes_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """zo, streamed from one host copy that both ranks page-lock."""
    launch = Launch(2, shared_results, tmp_path, "cuda")
    alone = run_shared(Ranks(), "cuda")
    assert launch.end() == [0, 0], launch.printed
    for rank in range(2):
        ours = torch.load(tmp_path / f"{rank}.pt")
        different = [key for key in alone.keys() - TOLD if not torch.equal(ours[key], alone[key])]
        assert not different and len(ours["shared"]) > 1, different


def test_parts_are_the_weights_of_one_process(tmp_path: Path) -> None:
    """lomo and its kin, resident and streamed, each rank with a part of the weights."""
    launch = Launch(2, write_lomo_results, tmp_path, "cuda")
    alone = lomo_results(Ranks(), "cuda")
    assert launch.end() == [0, 0], launch.printed
    assert_same_numbers([torch.load(tmp_path / f"{rank}.pt") for rank in range(2)], alone, close_to=1e-5)
