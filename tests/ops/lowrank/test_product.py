"""x (W + B V^T)^T + b without making W + B V^T: against the dense product, reference and kernel."""

import pytest
import torch

from keyhole.ops.backend import force
from keyhole.ops.lowrank.product import narrow, widen


@pytest.mark.parametrize("choice", ["reference", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 3, 20])
def test_equals_the_dense_product(kernel_device: torch.device, choice: str, dtype: torch.dtype, rank: int) -> None:
    """Each pass has its own factor and bias; shapes that no tile divides, factors that lie apart."""
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


@pytest.mark.parametrize("choice", ["reference", "kernel"])
def test_columns_of_a_wider_sketch(kernel_device: torch.device, choice: str) -> None:
    """Layers that read one input have their p beside each other: each takes its own columns."""
    draw = torch.Generator().manual_seed(0)
    x, v = (torch.randn(shape, generator=draw).to(kernel_device) for shape in ((2 * 7, 40), (6, 40)))
    b = torch.randn(2, 2, 30, generator=draw).to(kernel_device)
    with force(choice):
        p = narrow(x, v)
        for first in (0, 2, 4):
            y = widen(p[:, first : first + 2].unflatten(0, (2, 7)), b, None, torch.float32)
            own = narrow(x, v[first : first + 2]).unflatten(0, (2, 7))
            torch.testing.assert_close(y, widen(own, b, None, torch.float32), rtol=1e-5, atol=1e-4)


def test_no_bias() -> None:
    p, b = torch.randn(1, 4, 2), torch.randn(1, 2, 6)
    torch.testing.assert_close(widen(p, b, None, torch.float32), p @ b)
