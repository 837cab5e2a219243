"""What directions that follow the error (zo.guide) see of the gradient and of its noise, by kind of matrix.

    python benchmarks/error_directions.py MODEL TRAIN.tsv [--count 384] [--first 10]     (SST-2: sentence, label)

A prompt is "<sentence> It was", s_i = log p("great") - log p("terrible"), J_i its gradient. The loss is the logistic
loss of s_i minus a constant, for which the residuals of a set of questions sum to 0: the preference for one answer that
is corrected in the first steps is left out. Three disjoint sets of --count questions:

    v     of each matrix from the first set: forward passes, and the residuals (methods/zo/low_rank/error_directions.py)
    G     (g_2 v) . (g_3 v), g_2 and g_3 the gradients on the others: |gradient|^2 in the span, without noise of rows
    J     mean of |J_i v|^2 over 64 more questions: curvature, and with it the noise of rows

for v as `zo.guide` finds it, the first singular vector of g_1 (a backward pass), and all of W (what random directions
see). What a step at its best rate gains grows with G / J: it is G^2 / (2 c^2 J), c^2 = G + 0.2 J / rows.

Memory: four gradients in float32 of layers --first and later. Time: three backward passes per question (CPU: minutes).
"""

import argparse
import csv
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from gradient_groups import ANSWERS
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from keyhole.methods.zo.low_rank.error_directions import predictors

ROWS, SINGLE = 32, 64
Question = tuple[list[int], float]


class Probe:
    """The model, its layers, and what their inputs were in the last pass."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(self.device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        rows = [self.tokenizer(answer)["input_ids"][0] for answer in ANSWERS]
        terrible, great = self.model.lm_head.weight.detach()[rows]
        self.answer = great - terrible
        self.model.requires_grad_(False)
        self.layers: dict[str, torch.nn.Linear] = {}
        self.inputs: dict[str, torch.Tensor] = {}
        for number, block in enumerate(self.model.model.layers[args.first :], args.first):
            for name, layer in block.named_modules():
                if isinstance(layer, torch.nn.Linear):
                    self.layers[f"{number}.{name}"] = layer
        for name, layer in self.layers.items():
            layer.weight.requires_grad_(True)
            layer.register_forward_hook(lambda _, x, __, name=name: self.inputs.update({name: x[0].detach()}))

    def batches(self, questions: list[Question], size: int = ROWS) -> Iterator[tuple[torch.Tensor, ...]]:
        ordered = sorted(questions, key=lambda one: len(one[0]))
        for chosen in (ordered[i : i + size] for i in range(0, len(ordered), size)):
            length = max(len(ids) for ids, _ in chosen)
            ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in chosen], device=self.device)
            last = torch.tensor([len(ids) - 1 for ids, _ in chosen], device=self.device)
            yield ids, last, torch.tensor([label for _, label in chosen], device=self.device)

    def scores(self, ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return self.model.model(ids, use_cache=False).last_hidden_state[range(len(ids)), last] @ self.answer

    def offset(self, questions: list[Question]) -> float:
        """The constant for which the residuals sum to 0."""
        with torch.no_grad():
            s = torch.cat([self.scores(ids, last) for ids, last, _ in self.batches(questions)])
        low, high, wanted = float(s.min()), float(s.max()), sum(label for _, label in questions)
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if float((s - middle).sigmoid().sum()) > wanted else (low, middle)
        return middle

    def gradient(self, questions: list[Question]) -> tuple[dict[str, torch.Tensor], dict[str, Any], torch.Tensor]:
        """The gradient of the mean loss, the inputs of all layers at the last tokens, and the residuals."""
        offset, inputs, residuals = self.offset(questions), defaultdict(list), []
        self.model.zero_grad()
        for ids, last, label in self.batches(questions):
            s = self.scores(ids, last) - offset
            (F.binary_cross_entropy_with_logits(s, label, reduction="sum") / len(questions)).backward()
            residuals.append((s.sigmoid() - label).detach())
            for name, x in self.inputs.items():
                inputs[name].append(x[range(len(ids)), last])
        grads = {name: layer.weight.grad.clone() for name, layer in self.layers.items()}
        return grads, {name: torch.cat(x) for name, x in inputs.items()}, torch.cat(residuals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--count", type=int, default=384)
    parser.add_argument("--first", type=int, default=10)
    args = parser.parse_args()
    probe = Probe(args)
    with open(args.data) as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    rows = random.Random(2).sample(rows, 3 * args.count + SINGLE)
    encoded = [(probe.tokenizer(f"{r['sentence'].strip()} It was")["input_ids"], float(r["label"])) for r in rows]
    sets = [encoded[i * args.count : (i + 1) * args.count] for i in range(3)]
    g_1, inputs, residual = probe.gradient(sets[0])
    (g_2, _, _), (g_3, _, _) = (probe.gradient(one) for one in sets[1:])
    spans: dict[str, dict[str, torch.Tensor | None]] = {
        "all of W": dict.fromkeys(probe.layers),
        "zo.guide": {name: predictors(x[None], residual[:, None])[0, 0] for name, x in inputs.items()},
        "g_1": {name: torch.linalg.svd(g, full_matrices=False)[2][0] for name, g in g_1.items()},
    }

    def seen(g: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        return g if v is None else g @ (v / v.norm())

    signal, noise = defaultdict(float), defaultdict(float)
    for span, by_layer in spans.items():
        for name, v in by_layer.items():
            signal[span, name] = float((seen(g_2[name], v) * seen(g_3[name], v)).sum())
    for ids, last, _ in probe.batches(encoded[-SINGLE:], 1):
        probe.model.zero_grad()
        probe.scores(ids, last).sum().backward()
        for span, by_layer in spans.items():
            for name, v in by_layer.items():
                noise[span, name] += float(seen(probe.layers[name].weight.grad, v).square().sum()) / SINGLE
    kinds = list(dict.fromkeys(name.split(".")[-1] for name in probe.layers))
    print(f"G / J in thousandths, layers {args.first} and later, {args.count} questions in each set")
    print("| directions | all | " + " | ".join(kinds) + " |\n|---" + "|---" * (len(kinds) + 1) + "|")
    for span in spans:
        cells = []
        for kind in ["", *kinds]:
            names = [name for name in probe.layers if name.endswith(kind)]
            g, j = (sum(table[span, name] for name in names) for table in (signal, noise))
            cells.append(f"{1e3 * g / j:.2f}")
        print(f"| {span} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
