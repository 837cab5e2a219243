"""Seconds and memory of a fold of kept periods (zo.fold=false), for the matrices of a model's blocks.

    python benchmarks/fold_periods.py [--width 5120] [--blocks 40] [--terms 128] [--error 0.1] [--device cuda]

Times `Kept.fold`, part by part, on random factors of an OPT shape with `terms` per matrix and A of decreasing size. A
fold happens once in fold_periods x refresh steps (1,600 by default), between two steps.
"""

import argparse
import time
from types import SimpleNamespace
from typing import Any

import torch

from keyhole.methods.zo.low_rank import kept
from keyhole.methods.zo.low_rank.kept import Kept


def make(width: int, blocks: int, terms: int, error: float, device: torch.device, dtype: torch.dtype) -> Kept:
    """Kept terms as if that many periods of rank 1 had just ended."""
    sides = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    matrices, a_end, v_end = [], 0, 0
    for outputs, inputs in sides * blocks:
        a, v = slice(a_end, a_end + outputs), slice(v_end, v_end + inputs)
        matrices.append(SimpleNamespace(inputs=inputs, outputs=outputs, a=a, v=v))
        a_end, v_end = a.stop, v.stop
    found = Kept(SimpleNamespace(matrices=matrices, rank=1), dtype, None, error)
    for term in range(terms):
        found.add(torch.randn(a_end, device=device) * 0.97**term, torch.randn(v_end, device=device, dtype=dtype))
    return found


def timed(device: torch.device, spent: dict[str, float], name: str) -> Any:
    """The function of this name in kept.py, with its seconds noted."""
    function = getattr(kept, name)

    def run(*args: Any) -> Any:
        begin = now(device)
        result = function(*args)
        spent[name] = spent.get(name, 0.0) + now(device) - begin
        return result

    return run


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--terms", type=int, default=128)
    parser.add_argument("--error", type=float, default=0.1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found, spent = make(args.width, args.blocks, args.terms, args.error, device, dtype), {}
    for name in ("gram", "cuts", "combine"):
        setattr(kept, name, timed(device, spent, name))
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = now(device)
    found.fold(0)
    seconds = now(device) - begin
    parts = ", ".join(f"{name} {part:.2f}" for name, part in spent.items())
    print(found.last.line(args.error).partition(": ")[2])
    print(f"{6 * args.blocks} matrices of width {args.width}, {args.terms} terms: {seconds:.2f} s ({parts})")
    if device.type == "cuda":
        print(f"memory beside the factors: {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
