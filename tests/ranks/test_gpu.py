"""One rank over NCCL, two on one GPU over gloo: what the CPU tests show, with streams, page-locked memory, kernels."""

from pathlib import Path

import pytest
import torch

from keyhole.ranks import Ranks
from tests.matrix import in_every_run
from tests.ranks.cases import CASES, results, write_results
from tests.ranks.launch import Launch
from tests.ranks.test_gradients import assert_same_numbers
from tests.ranks.test_shared import assert_shared
from tests.ranks.workers import SHARED, run_shared, shared_results

pytestmark = pytest.mark.gpu


def test_shared_homes_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """zo, streamed from one host copy that both ranks page-lock."""
    launch = Launch(2, shared_results, tmp_path, "cuda")
    alone = {case: run_shared(Ranks(), "cuda", case) for case in SHARED}
    assert launch.end() == [0, 0], launch.printed
    assert_shared([torch.load(tmp_path / f"{rank}.pt") for rank in range(2)], alone)


OF_EACH_METHOD = (
    "lomo", "lomo, clipped", "adalomo", "lomo-lora, clipped", "apollo-mini", "muon, clipped",
    "adam-offload, experts, two workers", "lsp", "lsp, on the host, clipped", "adamw, clipped", "sgd, tied",
    "lora, int4, dropout", "galore",
)  # fmt: skip
OTHERS = tuple(name for name in CASES if name not in OF_EACH_METHOD)


@in_every_run(lambda names: names == OF_EACH_METHOD)
@pytest.mark.parametrize("names", [OF_EACH_METHOD, OTHERS], ids=["of_each_method", "others"])
@pytest.mark.parametrize("size", [1, 2], ids=["over_nccl", "over_gloo"])
def test_gradients_of_ranks_are_those_of_one_process(size: int, names: tuple[str, ...], tmp_path: Path) -> None:
    """Every method with gradients, resident and streamed. NCCL needs a GPU for each rank, so one rank alone, with its
    units as shards, goes through its collectives. galore's subspace is that of the largest singular values of a
    gradient: where two are nearly equal, rounding turns it, and Adam in it moves weights otherwise (by up to 3e-3 here
    in three steps). adalomo divides each row by its own size, and Adam each number: those whose gradients are rounding
    errors alone (units of an expert that are almost off) move as far as others, each process in its own direction."""
    launch = Launch(size, write_results, tmp_path, size, names, "cuda")
    alone = {name: results(CASES[name], Ranks(), "cuda") for name in names}
    assert launch.end() == [0] * size, launch.printed
    ours = [torch.load(tmp_path / f"{size} {rank}.pt") for rank in range(size)]
    assert [rank["nccl"] for rank in ours] == [size == 1] * size
    for name in names:
        close_to = 3e-4 if name == "galore" else 5e-5 if "adalomo" in name or "experts" in name else 1e-5
        assert_same_numbers(name, [rank[name] for rank in ours], alone[name], close_to)
        assert all(rank[name]["same"] for rank in ours), name
