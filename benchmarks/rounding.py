"""bf16 weights with stochastic rounding follow fp32; rounded to nearest they stall. Shown on the embedded model.

    python benchmarks/rounding.py [--steps 600] [--lr 2e-5] [--out benchmarks]

Three zeroth-order runs from the same weights, on the same batches, with the same noise: fp32 weights, bf16 weights with
stochastic rounding, bf16 weights rounded to nearest. A step is about lr |g| in every weight; where that is below half
the spacing of bf16 (2^-8 of the weight), nearest puts the weight back and the step is lost. Stochastic rounding moves
a share of the weights instead, so that the mean is right. Computing in bf16 makes the projected gradient noisier too;
all three therefore compute in fp32 and only *store* in another format (wire), so the curves differ by rounding alone.

Writes rounding.json and rounding.png: held-out loss every few steps, and the share of weights that each step changed.
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole.data import Loader, prepare
from keyhole.demo import paths

RUNS = {
    "fp32": ("fp32", "nearest"),
    "bf16, stochastic rounding": ("bf16", "stochastic"),
    "bf16, nearest": ("bf16", "nearest"),
}


def run(wire: str, rounding: str, steps: int, lr: float, every: int) -> dict[str, Any]:
    """One run; held-out losses at multiples of `every`, and the mean share of weights changed a step."""
    model = keyhole.load(paths.MODEL, dtype="float32", wire=wire, device="cpu")
    opt = keyhole.ZO(model, lr, seed=1, rounding=rounding)
    loader = Loader(prepare(str(paths.TRAIN), model.tokenizer, max_length=128), 16, seed=1, pad_to_multiple_of=1)
    held_out = Loader(prepare(str(paths.TEST), model.tokenizer, max_length=128), 64, seed=0, shuffle=False)
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
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: run(*how, args.steps, args.lr, args.every) for name, how in RUNS.items()}
    for name, result in results.items():
        first, last = result["losses"][0], result["losses"][-1]
        print(f"{name:28} held-out loss {first:.4f} -> {last:.4f}, {result['changed']:.1%} of weights changed a step")
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    settings = {"steps": args.steps, "lr": args.lr, "every": args.every}
    (args.out / "rounding.json").write_text(json.dumps({**settings, **machine, "runs": results}, indent=1) + "\n")
    draw(results, args.every, args.out / "rounding.png")


def draw(results: dict[str, Any], every: int, path: Path) -> None:
    """The three curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, result), style in zip(results.items(), ("k-", "C0--", "C3:"), strict=True):
        axes.plot([every * i for i in range(len(result["losses"]))], result["losses"], style, label=name)
    axes.set(xlabel="step", ylabel="held-out loss", title="Zeroth-order, embedded model: how weights are rounded")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
