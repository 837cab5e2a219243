"""The small kernels of a low-rank pass beside memory bandwidth, with several sizes of tiles.

    python benchmarks/ops_low_rank.py        needs a GPU, about half a minute

What one OPT-13B block runs beside its products for two looks of 1024 tokens, rank 2, in bfloat16: `widen` for q, k, v
and fc1, the sketch of the input of q, k and v (eight columns: those of out lie beside them), layer norms, and the two
additions to the residual stream with what the products before them lack (`correct`). Times are those of CUDA graphs
over buffers that do not fit the L2 cache together. Floor: the bytes that each reads and writes, at the rate of a copy.
The fastest tiles are printed last, against those in the code.
"""

import itertools
from typing import Any

import torch

from keyhole import ops
from keyhole.bench.measure import replayed_ms
from keyhole.bench.rates import copy_rate
from keyhole.ops.lowrank import correct, product
from keyhole.ops.lowrank import norm as norms

LOOKS, ROWS, WIDTH, RANK = 2, 1024, 5120, 2
OUTPUTS = [WIDTH] * 3 + [4 * WIDTH]
TILES: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "widen": (product, {"ROWS_OUT": (8, 16, 32), "COLUMNS": (512, 1024, 2048), "WARPS_OUT": (4, 8)}),
    "sketch": (product, {"ROWS_IN": (16, 32), "DEPTH": (128, 256, 512), "STAGES": (3, 5)}),
    "norm": (norms, {"PER_WARP": (512, 1024, 2048)}),
    "correct": (correct, {"ROWS": (8, 16), "COLUMNS": (256, 512), "WARPS": (2, 4)}),
}


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def cases() -> dict[str, tuple[Any, int]]:
    """Name -> (what runs, its bytes)."""
    p_LMr = drawn(LOOKS, ROWS, RANK, dtype=torch.float32)
    added = [(drawn(LOOKS, RANK, o, dtype=torch.float32), drawn(LOOKS, o)) for o in OUTPUTS]
    inputs = [drawn(LOOKS * ROWS, WIDTH) for _ in range(4)]
    v_kI, w_LD, b_LD = drawn(4 * RANK, WIDTH), drawn(LOOKS, WIDTH), drawn(LOOKS, WIDTH)
    pairs = list(zip(inputs[:2], inputs[2:], added[:2], strict=True))
    kind, row_bytes = norms.Norm(centred=True), 2 * LOOKS * ROWS * WIDTH
    return {
        "widen": (
            lambda: [ops.widen(p_LMr, b_LrO, bias_LO, torch.bfloat16) for b_LrO, bias_LO in added],
            2 * LOOKS * ROWS * sum(OUTPUTS),
        ),
        "sketch": (lambda: [ops.narrow(x_MI, v_kI) for x_MI in inputs], 4 * row_bytes),
        "norm": (lambda: [ops.norm(x_MD, w_LD, b_LD, 1e-5, kind) for x_MD in inputs], 4 * 2 * row_bytes),
        "correct": (lambda: [ops.correct(y, p_LMr, *small, other) for y, other, small in pairs], 2 * 3 * row_bytes),
    }


def main() -> None:
    rate = copy_rate(torch.device("cuda"))
    for name, (run, its_bytes) in cases().items():
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
        floor_ms = its_bytes / rate * 1e3
        for tile, ms in sorted(found.items(), key=lambda item: item[1])[:6]:
            print(f"{name:7} {tile!s:18} {ms:.4f} ms  {ms / floor_ms:.2f} of the floor", flush=True)
        print(f"{name:7} now {tuple(before.values())!s:14} {now:.4f} ms  {now / floor_ms:.2f}; best {best}", flush=True)
        for constant, value in before.items():
            setattr(module, constant, value)


if __name__ == "__main__":
    main()
