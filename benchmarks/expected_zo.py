"""What `zo` would learn without the noise of its estimator: the path of plain SGD with the same rates.

    python benchmarks/expected_zo.py MODEL TRAIN.tsv [--from-layer 10] [--rate 3e-3] [--steps 640] [--rows 256]
                                     [--at 100,320,640] [--held 2048]                  (SST-2: sentence, label)

The mean of c z over directions z, c the slope along z, is the gradient. So a run of `zo` follows SGD on average: at the
same sum of rates both have learnt the same, and what `zo` has beyond that is noise. Along the path of SGD, after
--at steps:

    sum      of the rates so far; that of n steps with linear decay from r is n r / 2
    loss, accuracy     on --held questions that are not trained on
    G        |gradient|^2: g_1 . g_2 of the two halves of the held questions, without the noise of rows
    S        mean |gradient of one question|^2 over 64 of them, the noise of rows
    signal   G / (G + S / B): the share of a step's slope that is the task's, in batches of B = 128 rows

and G and S by layers. The loss is that of a two-way question, as in gradient_signal.py. Trained: all parameters from
--from-layer on, the last norm included. GPU: a minute; without one, hours.
"""

import argparse
import random
from collections import defaultdict

import torch
from gradient_signal import AFTER, ROWS, Questions, layer_of
from torch import nn
from torch.nn import functional as F

BATCH, SINGLE, GROUP = 128, 64, 5


def loss_of(questions: Questions, chosen: list[int], reduction: str = "mean") -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(questions.scores(chosen), questions.label[chosen], reduction=reduction)


def gradient(questions: Questions, trained: dict[str, nn.Parameter], chosen: list[int]) -> dict[str, torch.Tensor]:
    """Of the mean loss of these questions."""
    questions.model.zero_grad()
    at_once = ROWS if questions.device.type == "cpu" else 256
    for begin in range(0, len(chosen), at_once):
        part = chosen[begin : begin + at_once]
        (loss_of(questions, part, "sum") / len(chosen)).backward()
    return {name: p.grad.clone() for name, p in trained.items()}


def tell(questions: Questions, trained: dict[str, nn.Parameter], held: list[int], total: float) -> None:
    """One line of the table, and one with G and S by layers."""
    with torch.no_grad():
        scores = torch.cat([questions.scores(held[i : i + 64]) for i in range(0, len(held), 64)])
    label = questions.label[held]
    loss, right = F.binary_cross_entropy_with_logits(scores, label), ((scores > 0).float() == label).float().mean()
    first, second = (gradient(questions, trained, held[half::2]) for half in (0, 1))
    G: dict[int, float] = defaultdict(float)
    S: dict[int, float] = defaultdict(float)
    for name in trained:
        G[layer_of(name) // GROUP * GROUP] += float((first[name] * second[name]).sum(dtype=torch.float64))
    singles = random.Random(2).sample(held, min(SINGLE, len(held)))
    for i in singles:
        for name, one in gradient(questions, trained, [i]).items():
            S[layer_of(name) // GROUP * GROUP] += float(one.square().sum(dtype=torch.float64)) / len(singles)
    g, s = sum(G.values()), sum(S.values())
    print(f"{total:7.3f} {loss:8.4f} {right:9.1%} {g:9.4f} {s:8.1f} {g / (g + s / BATCH):7.1%}")
    by_layers = ", ".join(
        f"{'after' if n == AFTER else f'{n} to {n + GROUP - 1}'}: {G[n]:.4f} / {S[n]:.1f} = {1e3 * G[n] / S[n]:.2f}"
        for n in sorted(G)
    )
    print(f"        G / S in thousandths by layers: {by_layers}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--from-layer", type=int, default=10)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--at", default="100,320,640")
    parser.add_argument("--held", type=int, default=2048)
    parser.add_argument("--count", type=int, default=20000, help="questions, the held ones included")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    questions, order = Questions(args), list(range(args.count))
    random.Random(3).shuffle(order)
    held, rest, draw = sorted(order[: args.held]), order[args.held :], random.Random(4)
    for name, p in questions.model.named_parameters():
        p.requires_grad_(layer_of(name) >= args.from_layer)
    trained = {name: p for name, p in questions.model.named_parameters() if p.requires_grad}
    print(f"{'sum':>7} {'loss':>8} {'accuracy':>9} {'G':>9} {'S':>8} {'signal':>7}")
    marks = {int(at) for at in args.at.split(",")}
    for step in range(1, args.steps + 1):
        found = gradient(questions, trained, sorted(draw.sample(rest, args.rows)))
        with torch.no_grad():
            for name, p in trained.items():
                p.sub_(found[name], alpha=args.rate)
        if step in marks:
            tell(questions, trained, held, step * args.rate)


if __name__ == "__main__":
    main()
