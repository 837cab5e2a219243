"""x (W + B V^T)^T + b without making W + B V^T: against the dense product, reference and kernel."""

import pytest
import torch

from keyhole.ops.backend import force
from keyhole.ops.lowrank.product import narrow, widen


@pytest.mark.parametrize("choice", ["reference", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 3, 20])
def test_equals_the_dense_product(kernel_device: torch.device, choice: str, dtype: torch.dtype, rank: int) -> None:
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(2 * 19, 70, generator=draw).to(kernel_device, dtype)
    v = torch.randn(rank, 70, generator=draw).to(kernel_device, dtype)
    store = torch.randn(2, rank * 45 + 60, generator=draw).to(kernel_device)
    b, bias = store[:, 5 : 5 + rank * 45].view(2, rank, 45), store[:, -45:]
    with force(choice):
        y = widen(narrow(x, v).view(2, 19, rank), b, bias, dtype)
    delta = torch.einsum("lro,ri->loi", b.double(), v.double())
    expected = torch.einsum("lmi,loi->lmo", x.double().view(2, 19, 70), delta) + bias.double()[:, None]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_no_bias() -> None:
    p, b = torch.randn(1, 4, 2), torch.randn(1, 2, 6)
    torch.testing.assert_close(widen(p, b, None, torch.float32), p @ b)
