"""Rows of a table, wherever the table lives.

An embedding looks up a few thousand rows of a table that may be a gigabyte of host memory. When that memory is
page-locked, a kernel can read it in place over the link: only the rows cross, in stream order, and the host does not
wait for anything. Bytes over the link: M x H x the element size.
Legend: V rows in the table, H width, M rows wanted.
"""

import torch

from keyhole.ops.backend import jit, on_device, tl, use_kernel

BLOCK = 1024


@jit(do_not_specialize=["row_len"])
def _gather_kernel(table_ptr, ids_ptr, out_ptr, row_len, BLOCK: tl.constexpr):
    """One program: BLOCK elements of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    mask = column < row_len
    source = tl.load(ids_ptr + row) * row_len
    tl.store(out_ptr + row * row_len + column, tl.load(table_ptr + source + column, mask), mask)


def gather_rows(table_VH: torch.Tensor, ids_M: torch.Tensor) -> torch.Tensor:
    """table_VH[ids_M] on the device of ids_M. A table on the host must be page-locked for the kernel to read it."""
    if table_VH.device == ids_M.device:
        return table_VH[ids_M]
    assert use_kernel(ids_M.device), "only a kernel can read host memory in place"
    out_MH = torch.empty((ids_M.numel(), table_VH.shape[1]), dtype=table_VH.dtype, device=ids_M.device)
    if ids_M.numel():
        grid = (ids_M.numel(), -(-table_VH.shape[1] // BLOCK))
        with on_device(out_MH):
            _gather_kernel[grid](table_VH, ids_M, out_MH, table_VH.shape[1], BLOCK=BLOCK)
    return out_MH
