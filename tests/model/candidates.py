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
    return padded(rows) | {"question": torch.tensor(question), "answer": torch.tensor(answer)}


def padded(rows: list[tuple[list[int], list[int]]], length: int = 0) -> dict[str, torch.Tensor]:
    """Rows of (prompt, trained tokens), as long as the longest of them."""
    length = max([length, *(len(a) + len(b) for a, b in rows)])

    def filled(lists: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([one + [value] * (length - len(one)) for one in lists])

    return {
        "input_ids": filled([a + b for a, b in rows], 0),
        "labels": filled([[-100] * len(a) + b for a, b in rows], -100),
        "attention_mask": filled([[1] * len(a + b) for a, b in rows], 0),
    }


def ragged(questions: int = 48, seed: int = 0, longest: int = 40, tokens: int = 1) -> dict[str, torch.Tensor]:
    """Questions behind prompts of 2 to `longest` tokens, most of them short; two candidates of 1 to `tokens` tokens."""
    generator = torch.Generator().manual_seed(seed)
    short = torch.randint(2, 9, (questions,), generator=generator).tolist()
    rows = []
    for prompt in [longest, *short[1:]]:
        begin = torch.randint(3, VOCAB, (prompt,), generator=generator).tolist()
        for _ in range(2):
            count = int(torch.randint(1, tokens + 1, (1,), generator=generator))
            rows.append((begin, torch.randint(3, VOCAB, (count,), generator=generator).tolist()))
    question = {"question": torch.arange(questions).repeat_interleave(2)}
    return padded(rows) | question | {"answer": torch.tensor([1, 0]).repeat(questions)}


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


def of_one_token(sizes: list[int], seed: int = 0, length: int = 7) -> dict[str, torch.Tensor]:
    """Questions whose candidates have one token each; prompts of 3 to 6 tokens, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    question_B = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    lengths = torch.randint(3, 7, (len(sizes),), generator=generator).tolist()
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    tokens = torch.randint(3, VOCAB, (sum(sizes), 1), generator=generator).tolist()
    rows = [(prompts[q], token) for q, token in zip(question_B.tolist(), tokens, strict=True)]
    first_B = torch.cat([torch.ones(1, dtype=torch.bool), question_B.diff() > 0])
    return padded(rows, length) | {"question": question_B, "answer": first_B.long()}
