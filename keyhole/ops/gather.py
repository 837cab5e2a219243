"""Rows of a table, wherever the table is.

An embedding looks up a few thousand rows of a table that may be a gigabyte of host memory. If that memory is
page-locked, a kernel can read it directly over the link: only the rows cross, in stream order, and the host does not
wait. Bytes over the link: M x H x the element size. Indices into the table are 64-bit whatever the dtype of the ids,
because a table may have more than 2^31 elements.
Legend: V rows in the table, H width, M rows looked up.
"""

import torch

from keyhole.ops.backend import jit, on_device, tl, use_kernel

BLOCK = 1024


@jit(do_not_specialize=["row_len"])
def _gather_kernel(table_ptr, ids_ptr, out_ptr, row_len, BLOCK: tl.constexpr):
    """One program: BLOCK elements of one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, source = column < row_len, tl.load(ids_ptr + row).to(tl.int64) * row_len
    tl.store(out_ptr + row * row_len + column, tl.load(table_ptr + source + column, mask), mask)


def gather_rows_triton(table_VH: torch.Tensor, ids_M: torch.Tensor) -> torch.Tensor:
    """table_VH[ids_M] on the device of ids_M, by kernel."""
    assert table_VH.is_contiguous(), table_VH.stride()
    M, H = ids_M.numel(), table_VH.shape[1]
    out_MH = torch.empty((M, H), dtype=table_VH.dtype, device=ids_M.device)
    if M:
        with on_device(out_MH):
            _gather_kernel[(M, -(-H // BLOCK))](table_VH, ids_M.contiguous(), out_MH, H, BLOCK=BLOCK)
    return out_MH


def gather_rows(table_VH: torch.Tensor, ids_M: torch.Tensor) -> torch.Tensor:
    """table_VH[ids_M] on the device of ids_M. A table on the host must be page-locked for the kernel to read it."""
    if table_VH.device == ids_M.device:
        return table_VH[ids_M]
    assert use_kernel(ids_M.device), "only a kernel can read host memory in place"
    return gather_rows_triton(table_VH, ids_M)
