"""Update and perturbation of 8-bit weights in one pass: the bits of the passes one after the other."""

from typing import Any

import pytest
import torch

from keyhole.ops import ZOStep, backend, fp8, zo_packed_
from tests.matrix import in_every_run
from tests.ops.test_fp8 import same

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not backend.INTERPRETED, reason="needs TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
UPDATE = {"update_step": 3, "coef": [1e-2, 0.7]}
CASES: dict[str, dict[str, Any]] = {
    "both": UPDATE,
    "perturb": {},
    "update": UPDATE | {"alone": True},
    "nearest, decay": UPDATE | {"rounding": "nearest", "weight_decay": 0.1},
    "two directions": {"update_step": 3, "coef": [1e-2, 0.7, -0.4], "direction": 1},
    "signs": UPDATE | {"distribution": "rademacher"},
}


def packed_weights(n: int) -> torch.Tensor:
    """Groups of very different sizes, one of zeros, one with values that are not finite."""
    w = torch.randn(n, generator=torch.Generator().manual_seed(1))
    w *= 10.0 ** (torch.arange(n) // 64 % 9 - 6).float()
    w[:64] = 0
    w[-3:] = torch.tensor([float("inf"), float("nan"), -float("inf")])
    packed = torch.empty(fp8.packed_bytes(n), dtype=torch.uint8)
    fp8.fp8_encode_(w, packed, offset=0, seed=0, step=0, rounding="nearest")
    return packed


def run(choice: str, n: int, offset: int, device: str, dtype: torch.dtype, case: dict[str, Any]) -> list[torch.Tensor]:
    case = dict(case)
    packed, changed = packed_weights(n).to(device), torch.zeros((), dtype=torch.int64, device=device)
    room = torch.full((2, n + 128), 7.0, dtype=dtype, device=device)
    plus, minus = (None, None) if case.pop("alone", False) else (row[64:-64] for row in room)
    if "coef" in case:
        case |= {"coef": torch.tensor(case["coef"], device=device), "changed": changed}
    with backend.force(choice):
        zo_packed_(packed, n, plus, minus, ZOStep(offset, seed=5, step=4, eps=1e-3, **case))
    return [x.cpu() for x in (packed, room, changed)]


@in_every_run(lambda n, case: n < 8192 or case in ("both", "two directions"))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n, offset", [(64, 0), (8192 + 1024 + 64, 4096 - 192), (640, 2**33 + 64)])
def test_the_kernel_is_the_reference(n: int, offset: int, case: str, device: str) -> None:
    dtype = torch.float32 if case == "signs" else torch.bfloat16
    kernel, reference = (run(c, n, offset, device, dtype, CASES[case]) for c in ("kernel", "reference"))
    assert torch.equal(kernel[0], reference[0])
    assert same(kernel[1], reference[1]) and kernel[2] == reference[2]
    if "coef" in CASES[case] and n > 64:
        assert not torch.equal(kernel[0], packed_weights(n)) and kernel[2] > 0


@pytest.mark.gpu
def test_on_a_gpu_equals_the_cpu() -> None:
    n = 2**22
    gpu = run("kernel", n, 192, "cuda", torch.bfloat16, CASES["both"])
    cpu = run("reference", n, 192, "cpu", torch.bfloat16, CASES["both"])
    assert torch.equal(gpu[0], cpu[0]) and same(gpu[1], cpu[1]) and gpu[2] == cpu[2]


@pytest.mark.parametrize("choice", ["kernel", "reference"])
def test_what_packing_loses_is_not_counted(choice: str) -> None:
    """A step far below the spacing of 8-bit numbers: rounded to nearest nothing moves, stochastically a few weights."""
    n, found = 8192, {}
    for rounding in ("nearest", "stochastic"):
        w = 1 + torch.rand(n, generator=torch.Generator().manual_seed(1))  # 2^-3 apart when packed
        packed, changed = torch.empty(fp8.packed_bytes(n), dtype=torch.uint8), torch.zeros((), dtype=torch.int64)
        fp8.fp8_encode_(w, packed, offset=0, seed=0, step=0, rounding="nearest")
        before = packed.clone()
        with backend.force(choice):
            update = {"coef": torch.tensor([1e-3, 1.0]), "update_step": 3, "rounding": rounding, "changed": changed}
            zo_packed_(packed, n, None, None, ZOStep(0, seed=5, **update))
        found[rounding] = int(changed)
        assert (int(changed) > 0) == (not torch.equal(before, packed))
    assert found["nearest"] == 0 and 0 < found["stochastic"] < n // 50
