"""Samples as the model will see them, readable in any terminal.

A sample is shown in runs of tokens that are either context (`read`) or trained, each with this word and the position of
its first token in front, so that the output is clear without colour. Tokens are separated by `|`, line breaks are
written \\n, and ids are below:

    sample 2 of 2 (notes.jsonl, line 2): 11 tokens, 3 trained
      read         0  The| soup| was| cold|.|\\n|Stamp|:
      ids             267 1133 264 676 17 202 318 29
      TRAINED      8   red| and| red
      ids             386 297 386
      cut      3 tokens after these, 3 of them trained:  and| red|<|end|>

Of long runs only the two ends are shown. In a packed row every sample has its own heading.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from keyhole.data.dataset import Dataset
from keyhole.data.token_texts import token_texts
from keyhole.errors import printable

SHOWN = 40  # tokens at each end of a long run
GREEN, RESET = "\033[32m", "\033[0m"


def preview(dataset: Dataset, tokenizer: Any, n: int = 3, *, color: bool = False, ids: bool = True) -> str:
    """The first n rows, token by token."""
    lines: list[str] = []
    for row in range(min(n, len(dataset))):
        if dataset.packed:
            size = f"{dataset.row_length(row)} tokens in {len(dataset.rows[row])} samples"
            lines.append(f"row {row + 1} of {len(dataset)}: {size}")
        for sample in dataset.rows[row]:
            lines += [*_sample(dataset, tokenizer, sample, color, ids), ""]
    return "\n".join(lines)


def _sample(dataset: Dataset, tokenizer: Any, index: int, color: bool, show_ids: bool) -> Iterator[str]:
    part = slice(dataset.starts[index], dataset.starts[index + 1])
    token_ids, trained = dataset.ids[part].tolist(), dataset.trained[part].tolist()
    place = printable(dataset.where[index], 300)
    count = f"{len(token_ids)} tokens, {sum(trained)} trained"
    yield f"sample {index + 1} of {len(dataset.lengths)} ({place}): {count}"
    start = 0
    for is_trained, group in groupby(trained):
        run = token_ids[start : start + len(list(group))]
        word, green = ("TRAINED", color) if is_trained else ("read", False)
        yield from run_lines(tokenizer, run, start, word, color=green, show_ids=show_ids)
        start += len(run)
    cut = dataset.cuts.get(index)
    if cut is not None and cut.before:
        yield f"  cut      {cut.before} tokens at the beginning of the prompt"
    if cut is not None and cut.tokens:
        shown = "|".join(_words(tokenizer, cut.first_ids)) + ("|..." if cut.tokens > len(cut.first_ids) else "")
        yield f"  cut      {cut.tokens} tokens after these, {cut.trained} of them trained: {shown}"


def run_lines(
    tokenizer: Any, run: list[int], start: int, word: str, *, color: bool = False, show_ids: bool = True
) -> Iterator[str]:
    """A run of tokens that begins at `start`, with a word in front that says their kind."""
    gap = len(run) - 2 * SHOWN
    pieces = [run] if gap <= SHOWN else [run[:SHOWN], run[-SHOWN:]]
    at = [start, start + len(run) - SHOWN]
    for i, piece in enumerate(pieces):
        if i == 1:
            yield f"           ... {gap} more ..."
        text = "|".join(_words(tokenizer, piece))
        text = f"{GREEN}{text}{RESET}" if color else text
        yield f"  {word:8} {at[i]:>5}  {text}"
        if show_ids:
            yield f"  {'ids':8}        {' '.join(map(str, piece))}"


def _words(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """Each token as text, with white space and control characters written out."""
    return [repr(text)[1:-1] for text in token_texts(tokenizer, token_ids)]
