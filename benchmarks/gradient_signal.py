"""Which weights a zeroth-order step should train: signal and curvature by groups of weights and by layers.

    python benchmarks/gradient_signal.py MODEL TRAIN.tsv [--count 640] [--rows 16,128]     (SST-2: sentence, label)

For question i, s_i = log p("great") - log p("terrible") after "<sentence> It was", J_i = its gradient; the loss is the
logistic loss of s_i - mean(s), without the preference for one answer that is corrected in the first steps.

    G     g_1 . g_2 of the gradients on two halves of the questions: |gradient|^2 of the task, without the noise of rows
    J     mean of |J_i|^2 over 32 questions; times p (1 - p), about 0.2, the trace of the Gauss-Newton matrix

A step of rate r along c z, c the slope along z, changes the loss by  -r G + r^2 c^2 J / 2  with  c^2 = G + 0.2 J / rows
(constant factors left out). The best rate is G / (c^2 J), and gains G^2 / (2 c^2 J). Both are printed for subsets of
the weights, as multiples of those of all weights.

Memory: three gradients in float32. Time: a backward pass per 32 questions, and one for each of 32 (CPU: minutes).
"""

import argparse
import csv
import random
import re
from collections import defaultdict
from collections.abc import Callable

import torch
from gradient_groups import ANSWERS, group_of
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS, SINGLE, SPREAD = 32, 32, 0.2
AFTER = 10**6  # number of what comes after the layers


class Questions:
    """Sentences with labels, shortest first."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(self.device)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        with open(args.data) as file:
            rows = random.Random(1).sample(
                list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)), args.count
            )
        found = [(tokenizer(f"{row['sentence'].strip()} It was")["input_ids"], float(row["label"])) for row in rows]
        found.sort(key=lambda one: len(one[0]))
        self.ids = [ids for ids, _ in found]
        self.label = torch.tensor([label for _, label in found], device=self.device)
        self.answers = [tokenizer(answer)["input_ids"][0] for answer in ANSWERS]  # one token each

    def scores(self, chosen: list[int]) -> torch.Tensor:
        """s of these questions."""
        length = max(len(self.ids[i]) for i in chosen)
        ids = torch.tensor([self.ids[i] + [0] * (length - len(self.ids[i])) for i in chosen], device=self.device)
        last = torch.tensor([len(self.ids[i]) - 1 for i in chosen], device=self.device)
        hidden = self.model.model(ids).last_hidden_state[range(len(chosen)), last]  # causal: padding is behind
        logits = hidden @ self.model.lm_head.weight[self.answers].T
        return logits[:, 1] - logits[:, 0]

    def gradient(self, chosen: list[int], offset: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of the mean loss of these questions."""
        self.model.zero_grad()
        for begin in range(0, len(chosen), ROWS):
            part = chosen[begin : begin + ROWS]
            scores = self.scores(part) - offset
            loss = F.binary_cross_entropy_with_logits(scores, self.label[part], reduction="sum") / len(chosen)
            loss.backward()
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def curvature(self) -> dict[str, float]:
        """J of every parameter."""
        found: dict[str, float] = defaultdict(float)
        for i in random.Random(2).sample(range(len(self.ids)), SINGLE):
            self.model.zero_grad()
            self.scores([i])[0].backward()
            for name, p in self.model.named_parameters():
                found[name] += float(p.grad.square().sum(dtype=torch.float64)) / SINGLE
        return found


def layer_of(name: str) -> int:
    """The number of its layer; -1 for the embedding, AFTER behind the layers."""
    if found := re.search(r"\.(\d+)\.", name):
        return int(found[1])
    return -1 if group_of(name) == "embedding" else AFTER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--count", type=int, default=640)
    parser.add_argument("--rows", default="16,128")
    args = parser.parse_args()
    questions, order = Questions(args), list(range(args.count))
    with torch.no_grad():
        score = torch.cat([questions.scores(order[i : i + 64]) for i in range(0, args.count, 64)])
    right = ((score > score.mean()).float() == questions.label).float().mean()
    print(
        f"{args.count} questions; scores {score.mean():.2f} +- {score.std():.2f}, centred {right:.1%} right", flush=True
    )
    first, second = (questions.gradient(order[half::2], score.mean()) for half in (0, 1))
    G = {name: float((first[name] * second[name]).sum(dtype=torch.float64)) for name in first}
    J = questions.curvature()

    def totals(kept: Callable[[str], bool]) -> tuple[float, float]:
        return sum(G[n] for n in G if kept(n)), sum(J[n] for n in G if kept(n))

    print(f"{'':26} {'G':>8} {'J':>8} {'1000 G / J':>10}")
    kinds = sorted({group_of(name) for name in G})
    last = max(layer for layer in map(layer_of, G) if layer < AFTER)
    told = {kind: (lambda n, kind=kind: group_of(n) == kind) for kind in kinds}
    for begin in range(0, last + 1, 5):
        told[f"layers {begin} to {min(begin + 4, last)}"] = lambda n, begin=begin: layer_of(n) // 5 == begin // 5
    for name, kept in told.items():
        g, j = totals(kept)
        print(f"{name:26} {g:8.3f} {j:8.0f} {1e3 * g / j:10.2f}")
    subsets: dict[str, Callable[[str], bool]] = {"all": lambda n: True}
    subsets["without the embedding"] = lambda n: layer_of(n) >= 0
    for begin in range(5, last, 5):
        subsets[f"from layer {begin}"] = lambda n, begin=begin: layer_of(n) >= begin
        subsets[f"from layer {begin}, attention"] = lambda n, begin=begin: layer_of(n) >= begin and "attn" in n

    def best(kept: Callable[[str], bool], rows: int) -> tuple[float, float]:
        g, j = totals(kept)
        return g * g / ((g + SPREAD * j / rows) * j), g / ((g + SPREAD * j / rows) * j)

    for rows in map(int, args.rows.split(",")):
        whole = best(subsets["all"], rows)
        for name, kept in subsets.items():
            gain, rate = best(kept, rows)
            print(f"{rows:4} rows, {name:26} gain {gain / whole[0]:5.2f}, rate {rate / whole[1]:6.2f}")


if __name__ == "__main__":
    main()
