"""Norms of several looks at once: against each look's norm by itself, and the kernel against the reference."""

import pytest
import torch
from torch import nn

from keyhole.ops.backend import force
from keyhole.ops.lowrank import norm as norms
from keyhole.ops.lowrank.norm import Norm, norm, norm_reference

KINDS = [Norm(True), Norm(False), Norm(False, early=True), Norm(False, plus_one=True)]
EPS = 1e-5


def inputs(device: torch.device, dtype: torch.dtype, looks: int, rows: int, width: int) -> list[torch.Tensor]:
    """Rows of several sizes, with a mean, that lie apart; vectors that lie in a larger array."""
    draw = torch.Generator().manual_seed(width)
    size = torch.tensor([1e-3, 1.0, 40.0])[torch.arange(looks * rows) % 3, None]
    x = ((torch.randn(looks * rows, width + 8, generator=draw) + 0.5) * size).to(device, dtype)
    store = torch.randn(looks, 2 * width + 24, generator=draw).to(device, dtype)
    return [x[:, 8:], store[:, 8 : 8 + width], store[:, -width:]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("looks, rows, width, bias", [(2, 3, 70, True), (3, 2, 8, False), (1, 3, 1100, True)])
def test_the_kernel_equals_the_reference(
    kernel_device: torch.device, kind: Norm, dtype: torch.dtype, looks: int, rows: int, width: int, bias: bool
) -> None:
    """Widths that no tile divides, several rows in a program: equal up to the order of two sums, so that in 16 bit
    few numbers round to the other side."""
    x, w, b = inputs(kernel_device, dtype, looks, rows, width)
    b = b if bias else None
    expected = norm_reference(x, w, b, EPS, kind)
    with force("kernel"):
        found = norm(x, w, b, EPS, kind)
    assert found.shape == expected.shape and found.dtype == dtype and found.is_contiguous()
    limit = max(2e-6, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)
    if dtype != torch.float32:
        assert float((found == expected).float().mean()) > 0.97


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_look_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    """The reference, on the CPU: nn.LayerNorm by itself on the rows of each look."""
    x, w, b = inputs(torch.device("cpu"), dtype, 2, 5, 33)
    y = norm(x, w, b, EPS, Norm(True))
    for look in range(2):
        one = nn.LayerNorm(33, EPS, dtype=dtype)
        one.weight.data, one.bias.data = w[look], b[look]
        assert torch.equal(one(x[5 * look : 5 * look + 5]), y[5 * look : 5 * look + 5])


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_and_rows_too_wide_for_a_program(
    kernel_device: torch.device, kind: Norm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are the reference's."""
    x, w, b = inputs(kernel_device, torch.float32, 2, 2, 40)
    monkeypatch.setattr(norms, "WIDEST", 39)
    with force("kernel"):
        assert norm(x[:0], w, b, EPS, kind).shape == (0, 40)
        assert torch.equal(norm(x, w, b, EPS, kind), norm_reference(x, w, b, EPS, kind))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 128, 5120, 16384, 32768])
def test_on_the_gpu(cuda: torch.device, kind: Norm, width: int) -> None:
    """Compiled, at the widths of models: against float64, and the same bits in every launch."""
    x, w, b = inputs(cuda, torch.bfloat16, 2, 150, width)
    y = norm(x, w, b, EPS, kind)
    expected = norm_reference(x, w, b, EPS, kind)
    torch.testing.assert_close(y, expected, rtol=2**-6, atol=2**-6)
    assert all(torch.equal(norm(x, w, b, EPS, kind), y) for _ in range(3))
