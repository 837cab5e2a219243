"""Batches of questions with candidates, and the loss over them as anyone would write it."""

import torch
from torch.nn import functional as F

from tests.model.decoders import VOCAB


def candidate_batch(sizes: list[int], seed: int = 0, vocab: int = VOCAB, prompt: int = 4) -> dict[str, torch.Tensor]:
    """Questions with so many candidates each, of 1 to 4 tokens behind a common prompt, padded on the right."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    rows, question, answer = [], [], []
    for q, size in enumerate(sizes):
        begin, right = draw(3, vocab, prompt), draw(0, size, 1)[0]
        rows += [(begin, draw(3, vocab, draw(1, 5, 1)[0])) for _ in range(size)]
        question += [q] * size
        answer += [int(k == right) for k in range(size)]
    length = max(len(a) + len(b) for a, b in rows)

    def padded(lists: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([one + [value] * (length - len(one)) for one in lists])

    return {
        "input_ids": padded([a + b for a, b in rows], 0),
        "labels": padded([[-100] * len(a) + b for a, b in rows], -100),
        "attention_mask": padded([[1] * len(a + b) for a, b in rows], 0),
        "question": torch.tensor(question),
        "answer": torch.tensor(answer),
    }


def plain_candidates_loss(module: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Mean over all questions of the cross entropy between candidates, scored by their mean log-likelihood."""
    parts = []
    for one in batches:
        logits_BTV = module(one["input_ids"], attention_mask=one["attention_mask"], use_cache=False).logits[:, :-1]
        labels_BT = one["labels"][:, 1:]
        nll_BT = F.cross_entropy(logits_BTV.float().transpose(1, 2), labels_BT, reduction="none", ignore_index=-100)
        score_B = -nll_BT.sum(dim=1) / (labels_BT != -100).sum(dim=1)
        for q in range(int(one["question"].max()) + 1):
            mine = one["question"] == q
            parts.append(-score_B[mine].log_softmax(dim=0)[one["answer"][mine].argmax()])
    return torch.stack(parts).mean()
