"""Rows of a data set for a page: token by token, with trained tokens marked.

The same rows as `keyhole data` prints (preview.py), as lists instead of lines. Of a long run of tokens
only the two ends are shown. A classifier's row has its label, and the right one of a question's candidates is named.
"""

from itertools import groupby
from typing import Any, NamedTuple

from keyhole.data.dataset import Dataset
from keyhole.data.token_texts import token_texts

MOST_SAMPLES = 4
SHOWN = 120  # tokens at each end of a long run


class Marked(NamedTuple):
    """A sample: its place in the file, a remark about it, and its runs of tokens: trained or not, as text."""

    where: str
    about: str
    runs: list[tuple[bool, list[str]]]


def marked(dataset: Dataset, tokenizer: Any, rows: int = 3, labels: tuple[str, ...] = ()) -> list[Marked]:
    """The first rows; of a packed row, or of a question, each sample."""
    found: list[Marked] = []
    for row in range(min(rows, len(dataset))):
        for i, sample in enumerate(dataset.rows[row]):
            if len(found) < MOST_SAMPLES:
                right = dataset.right is not None and dataset.right[row] == i
                found.append(_sample(dataset, tokenizer, sample, right, labels))
    return found


def _sample(dataset: Dataset, tokenizer: Any, index: int, right: bool, labels: tuple[str, ...]) -> Marked:
    part = slice(dataset.starts[index], dataset.starts[index + 1])
    ids, trained = dataset.ids[part].tolist(), dataset.trained[part].tolist()
    about = [f"{len(ids):,} tokens"]
    if dataset.targets is not None:
        target = dataset.targets[index]
        named = labels[target] if isinstance(target, int) and 0 <= target < len(labels) else f"{target:g}"
        about.append(f"label {named}")
    else:
        about.append(f"{sum(trained):,} trained")
    about += ["the right candidate" if right else "a wrong candidate"] if dataset.right is not None else []
    cut = dataset.cuts.get(index)
    about += [f"{cut.tokens + cut.before:,} tokens cut"] if cut is not None else []
    runs, start = [], 0
    for is_trained, group in groupby(trained):
        run = ids[start : start + len(list(group))]
        runs.append((bool(is_trained), _words(tokenizer, run)))
        start += len(run)
    return Marked(dataset.where[index], ", ".join(about), runs)


def _words(tokenizer: Any, run: list[int]) -> list[str]:
    gap = len(run) - 2 * SHOWN
    if gap > SHOWN:
        return [*token_texts(tokenizer, run[:SHOWN]), f" … {gap:,} more … ", *token_texts(tokenizer, run[-SHOWN:])]
    return token_texts(tokenizer, run)
