"""A zeroth-order step on a few rows of an embedding table.

A forward pass reads T rows of a table of V. Perturbing (and, with a deferred update, updating) all V H elements for
that would be most of the work of a small model. So only the needed rows are gathered as they are stored, still without
the pending update, and both are applied on the fly:

    plus, minus = w_row' +- eps z_row      w_row' = round(w_row - lr (u_row + wd w_row))

Every element goes through exactly the arithmetic of element.py with its own global index, offset + row H + column, so
the result equals, bit for bit, a gather from the fully updated and perturbed table; the table itself is updated later,
when the step visits it. Rows start anywhere in the noise tiles, so an element draws all four words of its group and
keeps one: 4 times the integer work, on T H elements instead of V H.

Legend: T rows gathered, H elements per row.
"""

import torch

from keyhole.ops.arguments import DTYPES
from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.noise.tiles import noise_at, noise_at_reference
from keyhole.ops.noise.words import on_host
from keyhole.ops.rounding.bits import bits_at, bits_at_reference
from keyhole.ops.zo.element import (
    NEXT,
    ZOStep,
    noise_words,
    perturb_reference,
    store_perturbed,
    updated,
    updated_reference,
)

BLOCK = 512  # elements per program


def zo_rows_reference(
    rows_TH: torch.Tensor, row_ids_T: torch.Tensor, plus_TH: torch.Tensor, minus_TH: torch.Tensor, how: ZOStep
) -> None:
    H = rows_TH.shape[1]
    e_TH = how.offset + row_ids_T.to(torch.int64).unsqueeze(1) * H + torch.arange(H, device=rows_TH.device)

    update_step, step = on_host(how.update_step), on_host(how.step)

    def draw(step: int, i: int) -> torch.Tensor:
        return noise_at_reference(e_TH, seed=how.seed, step=step, direction=i, distribution=how.distribution)

    if how.coef is not None:
        stochastic = how.is_stochastic(rows_TH.dtype)
        bits = bits_at_reference(e_TH, seed=how.seed, step=update_step) if stochastic else None
        rows_TH = updated_reference(rows_TH, how, lambda i: draw(update_step, i), bits)
    perturb_reference(rows_TH, lambda i: draw(step, i), how, plus_TH, minus_TH)


@jit(do_not_specialize=["offset", "update_step", "step", "direction", "k0", "k1", "eps", "wd"])
def _rows_kernel(
    rows_ptr, ids_ptr, plus_ptr, minus_ptr, coef_ptr,
    H, offset, update_step, step, direction, k0, k1, eps, wd, HOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if HOW.ON_DEVICE:
        update_step, step = tl.load(update_step), tl.load(step)
    update_key, direction, key = noise_words(update_step, step, direction, k0, k1)
    mask, at = column < H, row * H + column
    e = offset + tl.load(ids_ptr + row).to(tl.int64) * H + column
    w = tl.load(rows_ptr + at, mask)
    if HOW.Q > 0:
        u = tl.load(coef_ptr + 1) * noise_at(e, 0, update_key, HOW.GAUSSIAN)
        for i in range(1, HOW.Q):
            u = u + tl.load(coef_ptr + 1 + i) * noise_at(e, i, update_key, HOW.GAUSSIAN)
        bits = update_key[1]
        if HOW.STOCHASTIC:
            bits = bits_at(e, update_key)
        w, _ = updated(w, u, bits, tl.load(coef_ptr), wd, HOW)
    z = noise_at(e, direction, key, HOW.GAUSSIAN)
    z_next = z
    if HOW.PERTURB == NEXT:
        z_next = noise_at(e, direction + 1, key, HOW.GAUSSIAN)
    store_perturbed(plus_ptr + at, minus_ptr + at, mask, w, z, z_next, eps, HOW)


def zo_rows(
    rows_TH: torch.Tensor, row_ids_T: torch.Tensor, how: ZOStep, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(plus, minus, or as in how.beside) of gathered rows [T, H], in `dtype` (None: the rows').

    rows_TH: rows row_ids_T of a table, as stored; how.offset: global index of the table's first element. The input is
    not changed, and no changes are counted.
    """
    T, H = rows_TH.shape
    assert rows_TH.dtype in DTYPES and rows_TH.is_contiguous(), (rows_TH.dtype, rows_TH.stride())
    assert row_ids_T.shape == (T,) and row_ids_T.device == rows_TH.device, (row_ids_T.shape, row_ids_T.device)
    how.check(H, rows_TH.device)
    plus_TH, minus_TH = (torch.empty_like(rows_TH, dtype=dtype or rows_TH.dtype) for _ in range(2))
    tensors = (rows_TH, row_ids_T.contiguous(), plus_TH, minus_TH)
    if use_kernel(rows_TH.device) and rows_TH.numel():
        flags = how.flags(perturb=True, stochastic=how.is_stochastic(rows_TH.dtype))
        options = {"HOW": flags, "BLOCK": BLOCK, "num_warps": 4, "enable_fp_fusion": False}
        with on_device(rows_TH):
            _rows_kernel[(T, -(-H // BLOCK))](*tensors, how.coef, H, how.offset, *how.numbers(), **options)
    else:
        zo_rows_reference(*tensors, how)
    return plus_TH, minus_TH
