"""Does momentum, replayed from the seeds of the last steps, make `zo` learn sooner? Embedded model; minutes on a CPU.

    python benchmarks/momentum.py [--steps 300] [--seeds 0,1,2] [--rates 1e-3,2e-3] [--adam-rates 3e-4,1e-3]

A plain loop with MeZO's estimator: g_t = (L(w + eps z_t) - L(w - eps z_t)) / 2 eps. The last h pairs (g, z) are kept,
as if z had been drawn again from its seed, so nothing is rounded and nothing is cheaper than it would be:

    plain       w <- w - lr g_t z_t
    momentum    w <- w - lr m    m = (1 - b) sum_j b^j g_(t-j) z_(t-j), j < h
    adam        w <- w - lr m / (sqrt(v) + 1e-8)    v the same of squares, with b2; both weighted means

Same batches, same z and a linear rate for all; held-out loss over the answers, in float32.
"""

import argparse
from collections import deque

import torch

import keyhole
from keyhole import assets
from keyhole.data.loader import Loader
from keyhole.data.prepare import prepare

EPS, BATCH = 1e-3, 16
RULES = {"plain": (1, 0.0), "momentum 0.5": (10, 0.5), "momentum 0.9": (30, 0.9), "adam": (30, 0.9)}
BETA2 = 0.99


def weights(beta: float, count: int) -> torch.Tensor:
    """beta^0 .. beta^(count - 1), the newest first."""
    return torch.tensor([beta**j for j in range(count)])


def direction(rule: str, last: deque[tuple[float, torch.Tensor]]) -> torch.Tensor:
    """What the rate is multiplied by, from the last steps, the newest first."""
    slopes, z = torch.stack([g * z for g, z in last]), weights(RULES[rule][1], len(last))
    if rule != "adam":
        return (1 - RULES[rule][1]) * (z @ slopes)
    z2 = weights(BETA2, len(last))
    return (z @ slopes / z.sum()) / ((z2 @ slopes.square() / z2.sum()).sqrt() + 1e-8)


@torch.no_grad()
def run(rule: str, lr: float, steps: int, seed: int) -> float:
    """The held-out loss after the steps."""
    model = keyhole.load(assets.MODEL, dtype="float32", device="cpu")
    train, test = (prepare(str(path), model.tokenizer, max_length=128) for path in (assets.TRAIN, assets.TEST))
    loader = Loader(train, BATCH, seed=seed, pad_to_multiple_of=1)
    params = list(model.module.parameters())
    w = torch.cat([param.flatten() for param in params])
    generator = torch.Generator().manual_seed(seed)
    last: deque[tuple[float, torch.Tensor]] = deque(maxlen=RULES[rule][0])

    def loss(at: torch.Tensor, batches: list) -> float:
        for param, part in zip(params, at.split([param.numel() for param in params]), strict=True):
            param.copy_(part.view_as(param))
        nll, count = zip(*(model.nll(batch) for batch in batches), strict=True)
        return float(sum(n.sum() for n in nll) / sum(c.sum() for c in count))

    for step in range(steps):
        batches, z = loader.next_step(), torch.randn(w.numel(), generator=generator)
        slope = (loss(w + EPS * z, batches) - loss(w - EPS * z, batches)) / (2 * EPS)
        last.appendleft((slope, z))
        w = w - lr * (1 - step / steps) * direction(rule, last)
    held_out = Loader(test, len(test), seed=0, pad_to_multiple_of=1)
    return loss(w, held_out.next_step())


def main(argv: list[str] | None = None) -> dict[tuple[str, float], list[float]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rates", default="1e-3,2e-3")
    parser.add_argument("--adam-rates", default="3e-4,1e-3")
    args = parser.parse_args(argv)
    seeds, found = [int(seed) for seed in args.seeds.split(",")], {}
    print("| rule | rate | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean |")
    print("|---" * (len(seeds) + 3) + "|")
    for rule in RULES:
        for rate in (args.adam_rates if rule == "adam" else args.rates).split(","):
            losses = [run(rule, float(rate), args.steps, seed) for seed in seeds]
            found[rule, float(rate)] = losses
            cells = " | ".join(f"{loss:.3f}" for loss in losses)
            print(f"| {rule} | {rate} | {cells} | {sum(losses) / len(losses):.3f} |", flush=True)
    return found


if __name__ == "__main__":
    main()
