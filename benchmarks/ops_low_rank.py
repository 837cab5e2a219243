"""The small kernels of a low-rank pass beside memory bandwidth, with several sizes of tiles.

    python benchmarks/ops_low_rank.py        needs a GPU, about a minute

What one OPT-13B block runs beside its products for two looks of 1024 tokens, rank 2, in bfloat16: `widen` for q, k and
v, the sketch of their input (eight columns: those of out lie beside them), layer norms, the two additions to the
residual stream with what the products before them lack (`correct`), and the ReLU with what fc1 lacks and the sketch for
fc2 (`add`: the same, for the kernel that adds its parts). Times are those of CUDA graphs over buffers that do not fit
the L2 cache together. Floor: the bytes that each reads and writes, at the rate of a copy. The fastest tiles are printed
last, against those in the code. The last rows are what that ReLU replaces: `widen` of fc1 (whose output the product
then reads once more), and a ReLU with its sketch.
"""

import itertools
from functools import partial
from typing import Any

import torch

from keyhole import ops
from keyhole.bench.measure import replayed_ms
from keyhole.bench.rates import copy_rate
from keyhole.ops.lowrank import correct, product, relu
from keyhole.ops.lowrank import norm as norms

LOOKS, ROWS, WIDTH, RANK = 2, 1024, 5120, 2
TILES: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "widen": (product, {"ROWS_OUT": (8, 16, 32), "COLUMNS": (512, 1024, 2048), "WARPS_OUT": (4, 8)}),
    "sketch": (product, {"ROWS_IN": (16, 32), "DEPTH": (128, 256, 512), "STAGES": (3, 5)}),
    "norm": (norms, {"PER_WARP": (512, 1024, 2048)}),
    "correct": (correct, {"ROWS": (8, 16), "COLUMNS": (256, 512), "WARPS": (2, 4)}),
    "relu": (relu, {"ROWS": (8, 16), "COLUMNS": (256, 512, 1024), "WARPS": (2, 4)}),
    "add": (relu, {"NUMBERS": (64, 128), "AT_ONCE": (8, 16, 32)}),
}


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def cases() -> dict[str, tuple[Any, int]]:
    """Name -> (what runs, its bytes)."""
    p_LMr = drawn(LOOKS, ROWS, RANK, dtype=torch.float32)
    added = [(drawn(LOOKS, RANK, WIDTH, dtype=torch.float32), drawn(LOOKS, WIDTH)) for _ in range(3)]
    wide = drawn(LOOKS, RANK, 4 * WIDTH, dtype=torch.float32), drawn(LOOKS, 4 * WIDTH)
    inputs, inner = [drawn(LOOKS * ROWS, WIDTH) for _ in range(4)], drawn(LOOKS * ROWS, 4 * WIDTH)
    v_kI, w_LD, b_LD = drawn(4 * RANK, WIDTH), drawn(LOOKS, WIDTH), drawn(LOOKS, WIDTH)
    pairs = list(zip(inputs[:2], inputs[2:], added[:2], strict=True))
    v_rI, kind, row_bytes = drawn(RANK, 4 * WIDTH), norms.Norm(centred=True), 2 * LOOKS * ROWS * WIDTH
    rectify = partial(ops.narrow_relu, inner, v_rI, (p_LMr, *wide)), 2 * 4 * row_bytes
    return {
        "widen": (lambda: [ops.widen(p_LMr, *small, torch.bfloat16) for small in added], 3 * row_bytes),
        "sketch": (lambda: [ops.narrow(x_MI, v_kI) for x_MI in inputs], 4 * row_bytes),
        "norm": (lambda: [ops.norm(x_MD, w_LD, b_LD, 1e-5, kind) for x_MD in inputs], 4 * 2 * row_bytes),
        "correct": (lambda: [ops.correct(y, p_LMr, *small, other) for y, other, small in pairs], 2 * 3 * row_bytes),
        "relu": rectify,
        "add": rectify,
        "widen fc1": (lambda: ops.widen(p_LMr, *wide, torch.bfloat16), 4 * row_bytes),
        "relu alone": (lambda: ops.narrow_relu(inner, v_rI), 2 * 4 * row_bytes),
    }


def main() -> None:
    rate = copy_rate(torch.device("cuda"))
    for name, (run, its_bytes) in cases().items():
        floor_ms = its_bytes / rate * 1e3
        if name not in TILES:
            ms = replayed_ms(run)
            print(f"{name:10} {ms:.4f} ms  {ms / floor_ms:.2f} of the floor", flush=True)
            continue
        module, options = TILES[name]
        before = {constant: getattr(module, constant) for constant in options}
        found: dict[tuple[int, ...], float] = {}
        for tile in itertools.product(*options.values()):
            for constant, value in zip(options, tile, strict=True):
                setattr(module, constant, value)
            try:
                found[tile] = replayed_ms(run)
            except Exception as error:  # too much shared memory, or too many registers
                print(f"{name} {tile}: {str(error).partition(chr(10))[0]:.80}", flush=True)
        now, best = found[tuple(before.values())], min(found, key=found.__getitem__)
        for tile, ms in sorted(found.items(), key=lambda item: item[1])[:6]:
            print(f"{name:10} {tile!s:18} {ms:.4f} ms  {ms / floor_ms:.2f} of the floor", flush=True)
        print(
            f"{name:10} now {tuple(before.values())!s:14} {now:.4f} ms  {now / floor_ms:.2f}; best {best}", flush=True
        )
        for constant, value in before.items():
            setattr(module, constant, value)


if __name__ == "__main__":
    main()
