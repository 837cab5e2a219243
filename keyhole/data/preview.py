"""Rows as the model will see them: for `keyhole data`, in any terminal, and for the page of a run.

A sample is shown in runs of tokens that are either context (`read`) or trained, each with this word and the position of
its first token in front, so that the output is clear without colour. Tokens are separated by `|`, line breaks are
written \\n, and ids are below:

    sample 2 of 2 (notes.jsonl, line 2): 11 tokens, 3 trained
      read         0  The| soup| was| cold|.|\\n|Stamp|:
      ids             267 1133 264 676 17 202 318 29
      TRAINED      8   red| and| red
      ids             386 297 386
      cut      3 tokens after these, 3 of them trained:  and| red|<|end|>

Of long runs only the two ends are shown. In a packed row every sample has its own heading. Of a question the prompt is
shown once, then each candidate, `RIGHT` or `wrong`; a classifier's row has its label.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from keyhole.data.dataset import Dataset
from keyhole.data.tokenizer import Tokenizer, token_texts
from keyhole.errors import printable

SHOWN, SHOWN_ON_PAGE = 40, 120  # tokens at each end of a long run
MOST_ON_PAGE = 4
GREEN, RESET = "\033[32m", "\033[0m"


class Run(NamedTuple):
    """Consecutive tokens of a sample that are all trained, or all context."""

    trained: bool
    start: int
    ids: list[int]


class Marked(NamedTuple):
    """A sample for a page: its place in the file, a remark about it, and its runs of tokens, as text."""

    where: str
    about: str
    runs: list[tuple[bool, list[str]]]


def preview(
    dataset: Dataset, tokenizer: Tokenizer, n: int = 3, *, color: bool = False, labels: Sequence[str] = ()
) -> str:
    """The first n rows, token by token."""
    lines: list[str] = []
    for row in range(min(n, len(dataset))):
        samples = dataset.rows[row]
        if dataset.right is not None:
            right = samples[dataset.right[row]]
            runs = {i: _runs(dataset, i) for i in samples}
            shared = runs[samples[0]]
            where = f"question {row + 1} of {len(dataset):,} ({printable(dataset.where[samples[0]], 300)})"
            lines.append(f"{where}: {shared[-1].start} tokens of prompt, {len(samples)} candidates")
            lines += [line for run in shared if not run.trained for line in _lines(tokenizer, run, "read", False)]
            for i in sorted(samples, key=lambda i: i != right):
                lines += _lines(tokenizer, runs[i][-1], "RIGHT" if i == right else "wrong", color and i == right)
            lines.append("")
            continue
        if dataset.packed:
            size = f"{dataset.row_length(row)} tokens in {len(samples)} samples"
            lines.append(f"row {row + 1} of {len(dataset)}: {size}")
        for i in samples:
            where = f"sample {i + 1} of {len(dataset.lengths)} ({printable(dataset.where[i], 300)})"
            lines.append(f"{where}: {_about(dataset, i, labels)}")
            for run in _runs(dataset, i):
                lines += _lines(tokenizer, run, "TRAINED" if run.trained else "read", color and run.trained)
            cut = dataset.cuts.get(i)
            if cut is not None and cut.before:
                lines.append(f"  cut      {cut.before} tokens at the beginning of the prompt")
            if cut is not None and cut.tokens:
                shown = _line(tokenizer, cut.first_ids) + "|..." * (cut.tokens > len(cut.first_ids))
                lines.append(f"  cut      {cut.tokens} tokens after these, {cut.trained} of them trained: {shown}")
            lines.append("")
    return "\n".join(lines)


def marked(dataset: Dataset, tokenizer: Tokenizer, rows: int = 3, labels: Sequence[str] = ()) -> list[Marked]:
    """The first rows for a page; of a packed row, or of a question, each sample."""
    found: list[Marked] = []
    for row in range(min(rows, len(dataset))):
        for k, i in enumerate(dataset.rows[row][: MOST_ON_PAGE - len(found)]):
            about = [_about(dataset, i, labels)]
            if dataset.right is not None:
                about.append("the right candidate" if dataset.right[row] == k else "a wrong candidate")
            if cut := dataset.cuts.get(i):
                about.append(f"{cut.tokens + cut.before:,} tokens cut")
            runs = [(run.trained, _words_on_page(tokenizer, run.ids)) for run in _runs(dataset, i)]
            found.append(Marked(dataset.where[i], ", ".join(about), runs))
    return found


def _runs(dataset: Dataset, index: int) -> list[Run]:
    part = slice(dataset.starts[index], dataset.starts[index + 1])
    ids, runs, start = dataset.ids[part].tolist(), list[Run](), 0
    for trained, group in groupby(dataset.trained[part].tolist()):
        end = start + len(list(group))
        runs.append(Run(trained, start, ids[start:end]))
        start = end
    return runs


def _about(dataset: Dataset, index: int, labels: Sequence[str]) -> str:
    part = slice(dataset.starts[index], dataset.starts[index + 1])
    count = f"{dataset.lengths[index]:,} tokens"
    if dataset.targets is None:
        return f"{count}, {int(dataset.trained[part].sum()):,} trained"
    target = dataset.targets[index]
    named = labels[target] if isinstance(target, int) and 0 <= target < len(labels) else f"{target:g}"
    return f"{count}, label {named}"


def _lines(tokenizer: Tokenizer, run: Run, word: str, color: bool) -> Iterator[str]:
    """A run of tokens, with a word in front that says their kind; of a long one both ends."""
    gap = len(run.ids) - 2 * SHOWN
    for begin in (0,) if gap <= SHOWN else (0, SHOWN + gap):
        if begin:
            yield f"           ... {gap} more ..."
        ids = run.ids if gap <= SHOWN else run.ids[begin : begin + SHOWN]
        text = _line(tokenizer, ids)
        yield f"  {word:8} {run.start + begin:>5}  {f'{GREEN}{text}{RESET}' if color else text}"
        yield f"  {'ids':8}        {' '.join(map(str, ids))}"


def _line(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Each token as text, with white space and control characters written out."""
    return "|".join(repr(text)[1:-1] for text in token_texts(tokenizer, ids))


def _words_on_page(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    gap = len(ids) - 2 * SHOWN_ON_PAGE
    if gap <= SHOWN_ON_PAGE:
        return token_texts(tokenizer, ids)
    first, last = token_texts(tokenizer, ids[:SHOWN_ON_PAGE]), token_texts(tokenizer, ids[-SHOWN_ON_PAGE:])
    return [*first, f" … {gap:,} more … ", *last]
