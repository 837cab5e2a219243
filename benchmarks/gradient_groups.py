"""Where the gradient of a two-way question lies: its size and what questions have in common, by groups of weights, and
the norm of the gradient of a batch.

    python benchmarks/gradient_groups.py MODEL TRAIN.tsv [--count 40]          (SST-2: columns sentence, label)

For question i, s_i = log p("great") - log p("terrible") after "<sentence> It was", J_i = its gradient, e_i = p_i - y_i
the error of a logistic loss, so the gradient of a batch is the mean of e_i J_i. Printed for each group of weights,

    J J        mean of |J_i|^2
    cosine     mean of J_i . J_j over pairs / J J: what every question has in common, the preference for one answer
    curvature  mean of p (1 - p) |J_i|^2, scores centred: the trace of the Gauss-Newton matrix

and the norm of the gradient of batches of 16 over all weights but the embedding, with the scores as they are and
centred. What is left of the gradient in the mean over many questions is too small to be seen with some dozens of them.

Memory: a gradient in bfloat16 per question, 0.27 GB each for 135 million weights. Time: a backward pass per question.
"""

import argparse
import csv
import random
import re

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ANSWERS = (" terrible", " great")
CHUNK = 2**21
BATCH, DRAWS = 16, 2000


def group_of(name: str) -> str:
    """`embedding`, `norms`, or the kind of matrix."""
    if "embed" in name or "lm_head" in name:
        return "embedding"
    return "norms" if "norm" in name else re.sub(r".*\.(\w+)\.(weight|bias)$", r"\1", name)


def score(model: torch.nn.Module, tokenizer: object, sentence: str) -> torch.Tensor:
    """The difference of the answers' mean log-likelihoods."""
    prompt = tokenizer(f"{sentence.strip()} It was")["input_ids"]
    found = []
    for answer in ANSWERS:
        ids = torch.tensor([tokenizer(f"{sentence.strip()} It was{answer}")["input_ids"]])
        logp = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found.append(logp.gather(1, ids[0, len(prompt) :, None]).mean())
    return found[1] - found[0]


def gradients(model: torch.nn.Module, tokenizer: object, rows: list[dict[str, str]]) -> tuple[torch.Tensor, dict]:
    """(the scores, per group the matrix of all J_i . J_j)."""
    scores, kept = [], {}
    for row in rows:
        model.zero_grad()
        s = score(model, tokenizer, row["sentence"])
        s.backward()
        scores.append(s.item())
        own: dict[str, list[torch.Tensor]] = {}
        for name, param in model.named_parameters():
            own.setdefault(group_of(name), []).append(param.grad.flatten().bfloat16())
        for group, parts in own.items():
            kept.setdefault(group, []).append(torch.cat(parts))
    grams = {}
    for group in list(kept):
        J = torch.stack(kept.pop(group))
        pieces = (J[:, i : i + CHUNK].float() for i in range(0, J.shape[1], CHUNK))
        grams[group] = sum((piece @ piece.T).double() for piece in pieces)
    return torch.tensor(scores, dtype=torch.float64), grams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--count", type=int, default=40)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    with open(args.data) as file:
        rows = random.Random(0).sample(list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)), args.count)
    scores, grams = gradients(model, AutoTokenizer.from_pretrained(args.model), rows)
    y = torch.tensor([float(row["label"]) for row in rows], dtype=torch.float64)
    p = torch.sigmoid(scores - scores.mean())
    grams |= {"all": sum(grams.values()), "all but the embedding": sum(grams.values()) - grams["embedding"]}
    print(f"{args.count} questions; scores {scores.mean():.2f} +- {scores.std():.2f}")
    print(f"{'group':22} {'J J':>8} {'cosine':>7} {'curvature':>9}")
    for group, gram in sorted(grams.items(), key=lambda item: -item[1].diagonal().sum()):
        own = gram.diagonal().mean()
        pairs = (gram.sum() - gram.diagonal().sum()) / (len(y) * (len(y) - 1))
        print(f"{group:22} {own:8.0f} {pairs / own:7.2f} {(p * (1 - p) * gram.diagonal()).mean():9.0f}")
    for name, shift in (("as they are", 0.0), ("centred", scores.mean())):
        error = torch.sigmoid(scores - shift) - y
        errors = torch.outer(error, error) * grams["all but the embedding"]
        draw = torch.Generator().manual_seed(0)
        drawn = [torch.randperm(len(y), generator=draw)[:BATCH] for _ in range(DRAWS)]
        norms = torch.stack([errors[i][:, i].sum().sqrt() / BATCH for i in drawn])
        low, middle, high = norms.quantile(torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64))
        print(f"norm of a batch's gradient, scores {name}: {middle:.1f} ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
