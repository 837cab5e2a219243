"""bf16 weights with stochastic rounding follow fp32; rounded to nearest they stall. Shown on the embedded model.

    python benchmarks/rounding.py [--method zo | lomo] [--steps N] [--lr LR] [--out DIR]

Runs from the same weights, on the same batches (zo: with the same noise): fp32 weights, bf16 weights with stochastic
rounding, bf16 weights rounded to nearest; for zo also 8-bit weights with stochastic rounding, for lomo bf16 weights
with Kahan's compensation. A step is lr g in every weight; if that is below half the spacing of bf16 (2^-8 of the
weight), rounding to nearest returns the old weight and the step is lost. Stochastic rounding changes a share of the
weights instead, so that the mean is right; Kahan accumulates the lost part until it is large enough. Computing in bf16
makes gradients noisier too; so all runs compute in fp32 and only *store* in another format (wire), and the curves
differ by rounding alone.

Writes rounding_<method>.json and .png: held-out loss every few steps, and the share of weights that a step changed.
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole import assets
from keyhole.data.loader import Loader
from keyhole.data.prepare import prepare
from keyhole.methods import METHODS

RUNS = {
    "fp32": ("fp32", "nearest"),
    "bf16, stochastic rounding": ("bf16", "stochastic"),
    "bf16, nearest": ("bf16", "nearest"),
}
FP8 = {"fp8, stochastic rounding": ("fp8", "stochastic")}
KAHAN = {"bf16, nearest, Kahan": ("bf16", "kahan")}
SETTINGS = {
    "zo": {"steps": 600, "lr": 2e-5, "runs": RUNS | FP8},
    "lomo": {"steps": 300, "lr": 2e-4, "runs": RUNS | KAHAN},
}
STYLES = ("k-", "C0--", "C3:", "C2-.")


def run(method: str, wire: str, rounding: str, steps: int, lr: float, every: int) -> dict[str, Any]:
    """One run; held-out losses at multiples of `every`, and the mean share of weights changed per step."""
    model = keyhole.load(assets.MODEL, dtype="float32", wire=wire, device="cpu")
    opt = METHODS[method].load()(model, lr, seed=1, rounding=rounding)
    loader = Loader(prepare(str(assets.TRAIN), model.tokenizer, max_length=128), 16, seed=1, pad_to_multiple_of=1)
    held_out = Loader(prepare(str(assets.TEST), model.tokenizer, max_length=128), 64, seed=0, shuffle=False)
    batches = [batch for _ in range(3) for batch in held_out.next_step()]
    losses, changed = [], []
    for step in range(steps + 1):
        if step % every == 0:
            opt.flush()
            sums = [model.nll(batch) for batch in batches]
            losses.append(float(sum(n.sum() for n, _ in sums) / sum(c.sum() for _, c in sums)))
        if step < steps:
            opt.step(loader.next_step())
            changed.append(float(opt.metrics()["changed"]))
    return {"losses": losses, "changed": sum(changed[1:]) / max(1, len(changed) - 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=list(SETTINGS), default="zo")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    default = SETTINGS[args.method]
    steps, lr = args.steps or default["steps"], args.lr or default["lr"]
    results = {name: run(args.method, *how, steps, lr, args.every) for name, how in default["runs"].items()}
    for name, result in results.items():
        first, last = result["losses"][0], result["losses"][-1]
        print(f"{name:28} held-out loss {first:.4f} -> {last:.4f}, {result['changed']:.2%} of weights changed per step")
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    settings = {"method": args.method, "steps": steps, "lr": lr, "every": args.every}
    path = args.out / f"rounding_{args.method}.json"
    path.write_text(json.dumps({**settings, **machine, "runs": results}, indent=1) + "\n")
    draw(args.method, results, args.every, path.with_suffix(".png"))


def draw(method: str, results: dict[str, Any], every: int, path: Path) -> None:
    """One curve per run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, result), style in zip(results.items(), STYLES, strict=False):
        axes.plot([every * i for i in range(len(result["losses"]))], result["losses"], style, label=name)
    axes.set(xlabel="step", ylabel="held-out loss", title=f"{method}, embedded model: how weights are rounded")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
