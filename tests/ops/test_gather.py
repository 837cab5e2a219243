"""Rows of a table by kernel: torch's indexing, also past 2^31 elements."""

import pytest
import torch

from keyhole.ops.gather import gather_rows, gather_rows_triton


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_kernel_is_indexing(kernel_device: torch.device, dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    """Repeated rows, the first and the last, wider than one program, from ids with a stride; and no rows."""
    table_VH = torch.arange(70 * 1500, device=kernel_device).view(70, 1500).to(dtype)
    ids_M = torch.tensor([[0, 9], [69, 9], [7, 9], [7, 9]], dtype=ids_dtype, device=kernel_device)[:, 0]
    assert torch.equal(gather_rows_triton(table_VH, ids_M), table_VH[ids_M.long()])
    assert gather_rows_triton(table_VH, ids_M[:0]).shape == (0, 1500)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_positions_past_2_31_do_not_wrap(kernel_device: torch.device, ids_dtype: torch.dtype) -> None:
    """A table of 2^31 + 2^20 bytes, with as much memory before it for a position that wraps to read: of both only the
    pages of the last row are ever touched."""
    H, V = 4096, (1 << 19) + (1 << 8)
    memory = torch.empty((1 << 32) + (1 << 20), dtype=torch.uint8, device=kernel_device)
    table_VH = memory[1 << 31 :][: V * H].view(V, H)
    table_VH[V - 1] = torch.arange(H, device=kernel_device).to(torch.uint8)
    ids_M = torch.tensor([V - 1], dtype=ids_dtype, device=kernel_device)
    assert torch.equal(gather_rows_triton(table_VH, ids_M)[0], table_VH[V - 1])


@pytest.mark.gpu
def test_a_table_in_page_locked_host_memory(cuda: torch.device) -> None:
    table_VH = torch.randn(500, 300).pin_memory()
    ids_M = torch.tensor([3, 499, 3])
    assert torch.equal(gather_rows(table_VH, ids_M.to(cuda)).cpu(), table_VH[ids_M])
