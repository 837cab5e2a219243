"""The same update and perturbation for a few rows of an embedding table.

A forward pass reads T rows of a table of V. Perturbing (and, when the update is deferred, updating) all V H
elements for that would be most of the work of a small model; so the rows that are needed are gathered as they
are stored, still without the pending update, and both are applied on the fly:

    plus, minus = w_row' +- eps z_row      w_row' = round(w_row - lr (u_row + wd w_row))

Every element goes through exactly the arithmetic of element.py with its own global index, base + row H + column,
so the result is bit for bit a gather from the fully updated, fully perturbed table; the table itself is
updated later, when it passes by. Rows start anywhere in the noise tiles, so an element draws all four words
of its group and keeps one: 4 times the integer work, on T H elements instead of V H.

Legend: T rows gathered, H elements a row.
"""

import torch

from keyhole.ops.arguments import DTYPES, float32
from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.noise.tiles import check, int32, key, noise_at, noise_at_reference
from keyhole.ops.rounding.round import bits_at, bits_at_reference
from keyhole.ops.zo.element import perturb_reference, stochastic, store_perturbed, updated, updated_reference

BLOCK = 512  # elements a program

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _reference(rows_TH: torch.Tensor, row_ids_T: torch.Tensor, plus_TH: torch.Tensor | None,
               minus_TH: torch.Tensor | None, new_TH: torch.Tensor | None, *, offset: int, seed: int,
               distribution: str, coef: torch.Tensor | None, update_step: int, weight_decay: float,
               rounding: str, eps: float, step: int, direction: int) -> None:
    """Fill plus and minus, or the updated rows: whichever is not None."""
    H = rows_TH.shape[1]
    e_TH = offset + row_ids_T.to(torch.int64).unsqueeze(1) * H + torch.arange(H, device=rows_TH.device)

    def draw(at_step: int, i: int) -> torch.Tensor:
        return noise_at_reference(e_TH, seed=seed, step=at_step, direction=i, distribution=distribution)

    if coef is not None:
        bits = None
        if stochastic(rounding, rows_TH.dtype):
            bits = bits_at_reference(e_TH, seed=seed, step=update_step)
        rows_TH = updated_reference(rows_TH, coef, lambda i: draw(update_step, i), weight_decay, bits)
    if plus_TH is None:
        new_TH.copy_(rows_TH)
    else:
        perturb_reference(rows_TH, draw(step, direction), eps, plus_TH, minus_TH)


@jit(do_not_specialize=["offset", "update_step", "step", "direction", "k0", "k1", "eps", "wd"])
def _rows_kernel(rows_ptr, ids_ptr, plus_ptr, minus_ptr, new_ptr, coef_ptr, H, offset, update_step, step,
                 direction, k0, k1, eps, wd, Q: tl.constexpr, PERTURB: tl.constexpr, GAUSSIAN: tl.constexpr,
                 DECAY: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK columns of one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    update_step, step, direction = update_step.to(tl.uint32), step.to(tl.uint32), direction.to(tl.uint32)
    k0, k1 = k0.to(tl.uint32), k1.to(tl.uint32)
    mask, at = column < H, row * H + column
    e = offset + tl.load(ids_ptr + row).to(tl.int64) * H + column
    w = tl.load(rows_ptr + at, mask)
    if Q > 0:
        u = tl.load(coef_ptr + 1) * noise_at(e, update_step * 0, update_step, k0, k1, GAUSSIAN)
        for i in range(1, Q):
            z = noise_at(e, update_step * 0 + i, update_step, k0, k1, GAUSSIAN)
            u = u + tl.load(coef_ptr + 1 + i) * z
        bits = k0
        if STOCHASTIC:
            bits = bits_at(e, update_step, k0, k1)
        w, _ = updated(w, u, bits, tl.load(coef_ptr), wd, DECAY, STOCHASTIC)
    if PERTURB:
        z = noise_at(e, direction, step, k0, k1, GAUSSIAN)
        store_perturbed(plus_ptr + at, minus_ptr + at, mask, w, z, eps)
    else:
        tl.store(new_ptr + at, w, mask)


def _triton(rows_TH: torch.Tensor, row_ids_T: torch.Tensor, plus_TH: torch.Tensor | None,
            minus_TH: torch.Tensor | None, new_TH: torch.Tensor | None, *, offset: int, seed: int,
            distribution: str, coef: torch.Tensor | None, update_step: int, weight_decay: float,
            rounding: str, eps: float, step: int, direction: int) -> None:
    """The same by kernel."""
    T, H = rows_TH.shape
    with on_device(rows_TH):
        _rows_kernel[(T, -(-H // BLOCK))](
            rows_TH, row_ids_T, plus_TH, minus_TH, new_TH, coef, H, offset, int32(update_step), int32(step),
            direction, *key(seed), eps, weight_decay, Q=0 if coef is None else coef.numel() - 1,
            PERTURB=plus_TH is not None, GAUSSIAN=distribution == "gaussian", DECAY=weight_decay != 0,
            STOCHASTIC=coef is not None and stochastic(rounding, rows_TH.dtype), BLOCK=BLOCK, num_warps=4,
            enable_fp_fusion=False)


def zo_rows(rows_TH: torch.Tensor, row_ids_T: torch.Tensor, *, offset: int, seed: int,
            distribution: str = "gaussian", coef: torch.Tensor | None = None, update_step: int = 0,
            weight_decay: float = 0.0, rounding: str = "stochastic", eps: float | None = None, step: int = 0,
            direction: int = 0, dtype: torch.dtype | None = None) -> Rows:
    """(plus, minus) of gathered rows [T, H], in `dtype` (None: the rows'); without eps, the updated rows.

    rows_TH: rows row_ids_T of a table as stored; offset: global index of the table's first element. coef: the
    pending update, drawn at update_step (None: there is none). The input is left as it is.
    """
    T, H = rows_TH.shape
    assert rows_TH.dtype in DTYPES and rows_TH.is_contiguous() and row_ids_T.shape == (T,), (rows_TH.dtype,
                                                                                             row_ids_T.shape)
    assert row_ids_T.device == rows_TH.device, row_ids_T.device
    check(offset, H, seed, (update_step, step), max(0 if coef is None else coef.numel() - 1, direction + 1),
          distribution)
    if eps is None:
        plus_TH = minus_TH = None
        new_TH = torch.empty_like(rows_TH)
    else:
        plus_TH, minus_TH = (torch.empty_like(rows_TH, dtype=dtype or rows_TH.dtype) for _ in range(2))
        new_TH = None
    run = _triton if use_kernel(rows_TH.device) and rows_TH.numel() else _reference
    run(rows_TH, row_ids_T.contiguous(), plus_TH, minus_TH, new_TH, offset=offset, seed=seed,
        distribution=distribution, coef=coef, update_step=update_step, weight_decay=float32(weight_decay),
        rounding=rounding, eps=float32(eps or 0.0), step=step, direction=direction)
    return new_TH if eps is None else (plus_TH, minus_TH)
