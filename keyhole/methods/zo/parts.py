"""The rows of a step, cut into parts of adjacent samples (for estimators that give each part its own direction).

A sample is a row, or a question with all its candidates. Samples are numbered over all micro-batches of the step, and
sample s of n goes to part floor(s p / n) of p: parts differ by at most one sample, and do not depend on where
micro-batches begin. A part that spans two micro-batches has a piece of each. With fewer samples than parts, the last
parts are empty.
"""

import torch

from keyhole.model.batch import Batch


def sample_count(batch: Batch) -> int:
    """The number of questions of a batch; of its rows, if it has none."""
    if "question" in batch:
        return int(batch["question"][-1]) + 1
    return int(batch["input_ids"].shape[0])


def piece(batch: Batch, begin: int, end: int) -> Batch:
    """Samples [begin, end) of a batch."""
    if "question" not in batch:
        return {name: x[begin:end] for name, x in batch.items()}
    question_B = batch["question"]
    first, last = torch.searchsorted(question_B, torch.tensor([begin, end], device=question_B.device)).tolist()
    return {name: x[first:last] - begin if name == "question" else x[first:last] for name, x in batch.items()}


def split(batches: list[Batch], count: int) -> list[list[Batch]]:
    """`count` parts, each a list of pieces of micro-batches."""
    sizes = [sample_count(batch) for batch in batches]
    total = sum(sizes)
    used = min(count, total)
    parts: list[list[Batch]] = [[] for _ in range(count)]
    for i in range(used):
        begin, end, at = -(-i * total // used), -(-(i + 1) * total // used), 0
        for batch, size in zip(batches, sizes, strict=True):
            low, high = max(begin - at, 0), min(end - at, size)
            if low < high:
                parts[i].append(batch if (low, high) == (0, size) else piece(batch, low, high))
            at += size
    return parts
