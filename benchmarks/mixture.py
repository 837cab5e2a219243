"""Mixtral's widths in a small budget: experts as units, beside the resident model.

    python benchmarks/mixture.py [--blocks 8] [--methods zo=4GiB lomo=6GiB adalomo=6GiB] [--tokens 2x1024] [--steps 4]
                                 [--experts 8] [--out FILE.json]

For each method: some steps in its budget, then the same steps resident, from the same random weights. Prints planned
and measured peak (PyTorch's allocator, which the budget limits), seconds per step, GiB up and down per step, the share
of experts that were uploaded, and whether losses and weights (their SHA-256: 15 s for 8 blocks) are equal to the bit. A
block has 1.45 billion weights: 8 of them need 22 GiB of host memory if streamed, and of GPU memory if resident. Floor
of a streamed step: bytes up at the link's rate.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig

import keyhole
from keyhole.bench.measure import clear_device
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS


def run(method: str, budget: str | None, args: argparse.Namespace) -> dict[str, Any]:
    """The steps of one method; budget None: resident."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, length = map(int, args.tokens.split("x"))
    made = MixtralConfig(num_hidden_layers=args.blocks, num_local_experts=args.experts, **args.widths)
    row = METHODS[method]
    work = keyhole.Workload(method, rows * length, row.passes(row.settings()), row.settings())
    where = {"placement": "resident"} if budget is None else {"placement": "stream", "gpu_memory": budget}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = keyhole.load(made, init="random", dtype="bfloat16", device=device, workload=work, **where)
    rule = row.load()(model, row.learning_rate)
    drawn = torch.Generator().manual_seed(0)
    losses, seconds, up, down = [], [], [], []
    for _ in range(args.steps):
        ids = torch.randint(3, made.vocab_size, (rows, length), generator=drawn)
        before, begin = (model.engine.bytes_up, model.engine.bytes_down), time.perf_counter()
        losses.append(float(rule.step({"input_ids": ids, "labels": ids})))
        seconds.append(time.perf_counter() - begin)
        up.append((model.engine.bytes_up - before[0]) / GIB)
        down.append((model.engine.bytes_down - before[1]) / GIB)
    experts = {u.index for u in model.layout.units if u.expert is not None} & model.engine.streamed
    came = len(experts & set(model.engine.visited)) / max(1, len(experts))
    rule.flush()
    digest = hashlib.sha256()
    for _, tensor in model.named_tensors():
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    found = {
        "method": method, "budget": budget, "losses": losses, "weights": digest.hexdigest()[:16],
        "planned_gib": model.placed.device_bytes.total / GIB,
        "peak_gib": torch.cuda.max_memory_reserved() / GIB if device == "cuda" else None,
        "step_s": min(seconds[1:] or seconds), "up_gib": up[-1], "down_gib": down[-1], "experts_that_came": came,
        "said": model.describe(),
    }  # fmt: skip
    model.close()
    del model, rule, tensor
    clear_device(torch.device(device))
    return found


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--blocks", type=int, default=8)
    ask.add_argument("--experts", type=int, default=8)
    ask.add_argument("--methods", nargs="+", default=["zo=4GiB", "lomo=6GiB", "adalomo=6GiB"])
    ask.add_argument("--tokens", default="2x1024")
    ask.add_argument("--steps", type=int, default=4)
    ask.add_argument("--widths", type=json.loads, default={}, help="other settings of MixtralConfig, as JSON")
    ask.add_argument("--out", type=Path)
    args = ask.parse_args()
    rows = []
    for asked in args.methods:
        method, _, budget = asked.partition("=")
        small, whole = (run(method, b, args) for b in (budget, None))
        equal = small["losses"] == whole["losses"] and small["weights"] == whole["weights"]
        rows += [small | {"equal": equal}, whole]
        print(*small["said"], sep="\n")
        for one in (small, whole):
            peak = "-" if one["peak_gib"] is None else f"{one['peak_gib']:.2f}"
            print(
                f"{method} {one['budget'] or 'resident'}: planned {one['planned_gib']:.2f} GiB, peak {peak} GiB, "
                f"{one['step_s']:.3f} s per step, up {one['up_gib']:.2f} GiB, down {one['down_gib']:.2f} GiB, "
                f"{one['experts_that_came']:.0%} of the streamed experts came"
            )
        print(f"{method}: losses and weights {'equal to the bit' if equal else 'DIFFER'}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
