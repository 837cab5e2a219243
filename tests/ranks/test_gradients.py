"""Methods with gradients on several ranks, each with a part of the weights or all of them, are those of one process."""

from pathlib import Path

import pytest
import torch

from keyhole.ranks import Ranks
from tests.ranks.cases import BY_PROCESSES, CASES, LOMO, OFFLOAD, REPLICAS, SHARDS, results, write_memory, write_results
from tests.ranks.launch import Launch


def whole(parts: list[tuple[str, int, torch.Tensor]], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors put together from the parts of all ranks; nan where one is missing."""
    made = {name: torch.full_like(tensor, torch.nan) for name, tensor in like.items()}
    for name, begin, part in parts:
        made[name].view(-1)[begin : begin + part.numel()] = part.reshape(-1)
    return made


def assert_same_numbers(case: str, ours: list[dict], alone: dict, close_to: float = 1e-6) -> None:
    """What ranks have computed, put together, is what one process has computed."""
    expected = {name: part for name, _, part in alone["parts"]}
    found = whole([one for rank in ours for one in rank["parts"]], expected)
    assert all(torch.equal(rank["numbers"], ours[0]["numbers"]) for rank in ours), case
    exact = "bf16" not in case
    numbers, theirs = ours[0]["numbers"].view(3, 3), alone["numbers"].view(3, 3)
    close = {"rtol": 10 * close_to if exact else 1e-4, "atol": close_to, "msg": lambda m: f"{case} {m}"}
    torch.testing.assert_close(numbers[:, :2], theirs[:, :2], **close)
    torch.testing.assert_close(numbers[:, 2], theirs[:, 2], rtol=0.02, atol=0.0)  # a gradient of 0 may be 1e-12
    for name, tensor in expected.items():
        if exact:
            how = {"rtol": close_to, "atol": close_to, "msg": lambda m, n=name: f"{case} {n} {m}"}
            torch.testing.assert_close(found[name], tensor, **how)
        else:
            assert (found[name] != tensor).float().mean() < 0.005, (case, name)
            torch.testing.assert_close(found[name], tensor, rtol=0.02, atol=1e-4)
    kept, size = [rank["bytes"] for rank in ours], len(ours)
    if case in REPLICAS:
        assert kept == [0] * size
    else:
        assert len(set(kept)) == 1 and 0 < kept[0] <= alone["cut_bytes"] / size * 1.1 + 4096, (case, kept)


@pytest.mark.slow
def test_ranks_are_one_process(tmp_path: Path) -> None:
    """Four micro-batches of different sizes over two or four ranks, then one, which leaves ranks without work: losses,
    norms, counts and weights to 1e-6 in float32; at home in bfloat16 few are rounded the other way; the same bits from
    run to run. What ranks receive is what docs/ranks.md says; what they keep falls as 1 / N."""
    torch.set_num_threads(1)
    ours: dict[int, list[dict]] = {}
    launches = {size: Launch(size, write_results, tmp_path, size, BY_PROCESSES) for size in (2, 4)}
    alone = {name: results(CASES[name], Ranks()) for name in BY_PROCESSES}
    for size, launch in launches.items():
        assert launch.end() == [0] * size, launch.printed
        ours[size] = [torch.load(tmp_path / f"{size} {rank}.pt") for rank in range(size)]
    for name in BY_PROCESSES:
        found = [rank[name] for rank in ours[CASES[name].size]]
        assert_same_numbers(name, found, alone[name])
        assert all(rank["same"] for rank in found), name
    received_as_told(ours[2][0], alone)
    falls_with_ranks("host", *(ours[size][0]["memory"] for size in (2, 4)))


@pytest.mark.matrix  # a minute of both cores; what ranks keep of the weights is counted above
@pytest.mark.parametrize("method", [LOMO, OFFLOAD])
def test_device_memory_falls_with_ranks(method: type, tmp_path: Path) -> None:
    """By the allocator's own count."""
    for size in (2, 4):
        launch = Launch(size, write_memory, tmp_path, method)
        assert launch.end() == [0] * size, launch.printed
    falls_with_ranks("device", *(torch.load(tmp_path / f"memory {size}.pt") for size in (2, 4)))


def received_as_told(ours: dict, alone: dict) -> None:
    """Three steps on two ranks: two gathers of weights and an exchange of gradients; table and common
    are summed. A slot that still holds its unit is not gathered again; where a gate rewrites homes, all are."""
    for name, least in (("lomo", 0.6), ("adam-offload", 0.8)):
        cut, rest = alone[name]["cut_bytes"], ours[name]["all_bytes"] - alone[name]["cut_bytes"]
        told = 3 * (3 * cut + 2 * rest) / 2
        assert least * told < ours[name]["received_bytes"] < 1.1 * told, name


def falls_with_ranks(place: str, two: dict[str, int], four: dict[str, int]) -> None:
    """From two ranks to four, a quarter of the weights and of the state leaves: on the device, and on the host (Adam's
    state of 12 bytes, and 4 for gradients) by what was mapped."""
    fell = two[f"{place}_bytes"] - four[f"{place}_bytes"]
    # on the device what an exchange needs falls as well, and gloo may still hold up to three of the 24 blocks
    times, least, most = (4, 0.97, 1.03) if place == "host" else (1, 0.7, 2.0)
    assert least < fell / (times * two["cut_bytes"] / 4) < most, (place, two, four)


def test_every_method_is_here() -> None:
    """A method that several ranks may train has a case."""
    from keyhole.methods import METHODS

    able = {row.load() for name, row in METHODS.items() if row.ranks is not None and row.sweep != "forward"}
    assert able == {case.method for case in (SHARDS | REPLICAS).values()}
