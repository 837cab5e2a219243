"""Rows as the model will see them: for `keyhole data`, in any terminal, and for the page of a run.

A sample is shown in runs of tokens that are either context (`read`) or trained, each with this word and the position of
its first token in front, so that the output is clear without colour. Tokens are separated by `|`, line breaks are
written \\n, and ids are below:

    sample 2 of 2 (notes.jsonl, line 2): 11 tokens, 3 trained, 3 more cut at the end (3 trained)
      read         0  The| soup| was| cold|.|\\n|Stamp|:
      ids             267 1133 264 676 17 202 318 29
      TRAINED      8   red| and| red
      ids             386 297 386
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from keyhole.data.dataset import Cut, Dataset
from keyhole.data.report import Marked
from keyhole.data.tokenizer import Tokenizer, token_texts
from keyhole.errors import printable

SHOWN, SHOWN_ON_PAGE = 40, 120  # tokens at each end of a long run
MOST_ON_PAGE = 4
GREEN, RESET = "\033[32m", "\033[0m"
CANDIDATES = {"RIGHT": ", the right candidate", "wrong": ", a wrong candidate"}


class Run(NamedTuple):
    """Consecutive tokens of a sample that are all trained, or all context (`read`)."""

    word: str
    start: int
    ids: list[int]


def preview(
    dataset: Dataset, tokenizer: Tokenizer, n: int = 3, *, color: bool = False, labels: Sequence[str] = ()
) -> str:
    lines: list[str] = []
    for row in range(min(n, len(dataset))):
        samples = len(dataset.rows[row])
        if dataset.right is not None:
            lines.append(f"question {row + 1} of {len(dataset):,}: {samples} candidates")
        elif dataset.packed:
            lines.append(f"row {row + 1} of {len(dataset)}: {dataset.row_length(row)} tokens in {samples} samples")
        for i, about, runs in _samples(dataset, row, labels):
            lines.append(f"sample {i + 1} of {len(dataset.lengths)} ({printable(dataset.where[i], 300)}): {about}")
            lines += [*(line for run in runs for line in _lines(tokenizer, run, color)), ""]
    return "\n".join(lines)


def marked(dataset: Dataset, tokenizer: Tokenizer, labels: Sequence[str] = ()) -> list[Marked]:
    """The first rows for a page; of a packed row, or of a question, each sample."""
    found = []
    for row in range(min(3, len(dataset))):
        for i, about, runs in _samples(dataset, row, labels):
            told = about + CANDIDATES.get(runs[-1].word, "")
            words = [(run.word != "read", _words_on_page(tokenizer, run.ids)) for run in runs]
            found.append(Marked(dataset.where[i], told, words))
    return found[:MOST_ON_PAGE]


def _samples(dataset: Dataset, row: int, labels: Sequence[str]) -> Iterator[tuple[int, str, list[Run]]]:
    """The index, a remark and the runs of each sample of a row, the right candidate first."""
    right = None if dataset.right is None else dataset.rows[row][dataset.right[row]]
    for i in sorted(dataset.rows[row], key=lambda i: i != right) if right is not None else dataset.rows[row]:
        part, about = slice(dataset.starts[i], dataset.starts[i + 1]), f"{dataset.lengths[i]:,} tokens"
        ids, trained, cut = dataset.ids[part].tolist(), dataset.trained[part].tolist(), dataset.cuts.get(i, Cut())
        if dataset.targets is None:
            about += f", {sum(trained):,} trained"
        else:
            target = dataset.targets[i]
            is_named = isinstance(target, int) and 0 <= target < len(labels)
            about += f", label {labels[int(target)] if is_named else f'{target:g}'}"
        about += f", {cut.before} cut at the beginning of the prompt" if cut.before else ""
        about += f", {cut.tokens} more cut at the end ({cut.trained} trained)" if cut.tokens else ""
        word = "TRAINED" if right is None else "RIGHT" if i == right else "wrong"
        runs: list[Run] = []
        for is_trained, group in groupby(trained):
            start = runs[-1].start + len(runs[-1].ids) if runs else 0
            runs.append(Run(word if is_trained else "read", start, ids[start : start + len(list(group))]))
        yield i, about, runs


def _ends(ids: list[int], most: int) -> tuple[list[int], int, list[int]]:
    """The tokens to show of a run, how many are left out after them, and those at its end."""
    gap = len(ids) - 2 * most
    return (ids, 0, []) if gap <= most else (ids[:most], gap, ids[-most:])


def _lines(tokenizer: Tokenizer, run: Run, color: bool) -> Iterator[str]:
    """A run of tokens, with a word in front that says its kind; of a long one both ends."""
    first, gap, last = _ends(run.ids, SHOWN)
    for start, ids in ((0, first), (len(first) + gap, last)):
        if start and ids:
            yield f"           ... {gap} more ..."
        if ids:
            text = "|".join(repr(text)[1:-1] for text in token_texts(tokenizer, ids))
            shown = f"{GREEN}{text}{RESET}" if color and run.word in ("TRAINED", "RIGHT") else text
            yield f"  {run.word:8} {run.start + start:>5}  {shown}"
            yield f"  {'ids':8}        {' '.join(map(str, ids))}"


def _words_on_page(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    first, gap, last = _ends(ids, SHOWN_ON_PAGE)
    return token_texts(tokenizer, first) + ([f" … {gap:,} more … ", *token_texts(tokenizer, last)] if gap else [])
