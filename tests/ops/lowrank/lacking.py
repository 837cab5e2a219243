"""Products that lack their small part, and what they are with it."""

import torch


def problem(
    device: torch.device, dtype: torch.dtype, looks: int, rows: int, width: int, rank: int, bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """y, a residual, and what y lacks: p are columns of a wider array, B and the bias parts of a larger one."""
    draw = torch.Generator().manual_seed(100 * rank + width)
    y, residual = (torch.randn(looks * rows, width, generator=draw).to(device, dtype) for _ in range(2))
    p = torch.randn(looks, rows, rank + 3, generator=draw).to(device)[:, :, 2 : 2 + rank]
    store = torch.randn(looks, rank * width + width + 9, generator=draw).to(device)
    b = store[:, 5 : 5 + rank * width].unflatten(1, (rank, width))
    return y, residual, (p, b, store[:, -width:] if bias else None)


def in_float64(y: torch.Tensor, lacks: tuple) -> torch.Tensor:
    p, b, bias = lacks
    small = p.double() @ b.double() + (0 if bias is None else bias.double()[:, None])
    return y.double() + small.view(y.shape)


def close(found: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    """Up to some roundings of the dtype, and in float32 of the sum's terms."""
    limit = roundings * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=limit, atol=max(8 * limit, 1e-5))
