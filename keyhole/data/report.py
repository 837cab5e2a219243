"""A report of a few lines: what was read of the data, and how it was changed.

Everything that is lost between the file and the loss is counted and reported as a warning: cut answers, dropped
samples, tool calls, reasoning, system prompts, questions or documents that the chat template does not write.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from keyhole.data.examples import WITH_A_MEANING
from keyhole.errors import listed, printable
from keyhole.machine.text import counted

MOST_FILES = 5
MOST_KEYS = 100  # names from the data that are counted
WITHOUT = "the chat template does not write"
LOST = {  # what chats lose (answers.py), by its kind
    "calls": f"answers call tools, which {WITHOUT}; these answers are not trained on",
    "reasoning": f"answers have reasoning that {WITHOUT}; they are trained on without it",
    "text": f"answers have text that {WITHOUT} as it stands",
    "context": f"turns of system, user or tools have text that {WITHOUT} as it stands",
    "tools": f"chats have tools whose descriptions {WITHOUT}",
    "documents": f"chats have documents that {WITHOUT}",
    "variables": "chats have variables in chat_template_kwargs that the chat template does not read",
    "empty": "answers are empty: they teach the model to say nothing",
}


@dataclass
class Marked:
    """A sample for a page: its place in the file, a remark about it, and its runs of tokens, trained or context, as
    text."""

    where: str
    about: str
    runs: list[tuple[bool, list[str]]] = field(default_factory=list)


@dataclass
class Report:
    """Counts; `lines()` formats them."""

    formats: dict[str, str] = field(default_factory=dict)  # file -> its layout, and the reason
    read: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    split: int = 0  # texts that became several samples
    truncated: int = 0
    cut_trained_tokens: int = 0
    dropped_overlong: int = 0
    dropped_untrained: int = 0
    dropped_no_choice: int = 0
    duplicates: int = 0
    lost: Counter[str] = field(default_factory=Counter)  # Rendered.lost of answers.py
    unread: Counter[str] = field(default_factory=Counter)  # column that its layout does not use -> rows
    unknown: int = 0  # tokens that stand for text that the tokenizer does not know
    foreign: Counter[str] = field(default_factory=Counter)  # control token of another tokenizer -> texts
    rows: int = 0
    max_length: int | None = None
    packed: bool = False
    partial: bool = False
    template: str = ""
    train_on: str = "answers"
    mixture: str = ""
    cached: str = ""  # the file that the tokens were read from
    labels: str = ""  # for a classifier: rows per label
    unused: list[str] = field(default_factory=list)  # settings about chats, where no row is one
    remarks: list[str] = field(default_factory=list)  # about the files (sources.py)

    @classmethod
    def read_back(cls, told: dict[str, Any]) -> "Report":
        return cls(**told | {name: Counter(told[name]) for name in ("lost", "unread", "foreign")})

    def lines(self) -> list[str]:
        """The counts as lines, what is lost last; zero counts are left out."""
        limit, files = f"max_length={self.max_length}", list(self.formats.items())
        share = _percent(self.trained_tokens, self.tokens)
        trained = f"{self.trained_tokens:,} trained on ({share}, train_on={self.train_on})"
        others = [name for name in self.unread if name not in WITH_A_MEANING]
        fill = _percent(self.tokens, self.rows * (self.max_length or 1))
        told = [
            *((True, f"{printable(name, 300)}: {why}") for name, why in files[:MOST_FILES]),
            (len(files) > MOST_FILES, f"... and {len(files) - MOST_FILES} more files"),
            (self.template, f"template: {self.template}"),
            (
                True,
                f"{counted(self.samples, 'sample')} of {counted(self.read, 'row')} read, {self.tokens:,} tokens "
                f"(longest sample {self.longest:,}), {self.labels or trained}",
            ),
            (self.partial, "only the first rows were read; `keyhole train --dry-run` counts all of them"),
            (others, f"columns that are not used: {_named(self.unread, 'row', others)}"),
            (self.mixture, self.mixture),
            (self.cached, f"tokens read from {printable(self.cached, 300)} (data_cache)"),
            (self.split, f"split into samples: {counted(self.split, 'text')} longer than {limit}"),
            (self.duplicates, f"dedup: {self.duplicates:,} samples are the same as an earlier one and are left out"),
            (self.packed, f"packed into {counted(self.rows, 'row')} of {self.max_length} tokens, {fill} filled"),
        ]
        return [line for holds, line in told if holds] + [f"warning: {loss}" for loss in self.losses()]

    def losses(self) -> list[str]:
        """What is lost between the files and the loss, a line for each kind."""
        limit = f"max_length={self.max_length}"
        meant = [name for name in self.unread if name in WITH_A_MEANING]
        cut = _percent(self.cut_trained_tokens, self.trained_tokens + self.cut_trained_tokens)
        cut = "" if self.labels else f", {cut} of the trained tokens cut ({self.cut_trained_tokens:,})"
        told = [
            (self.unused, f"{' and '.join(self.unused)}: no effect, because no row is a chat"),
            (self.truncated, f"truncated to {limit}: {counted(self.truncated, 'sample')}{cut}"),
            (self.dropped_overlong, f"dropped: {counted(self.dropped_overlong, 'sample')} longer than {limit}"),
            (
                self.dropped_no_choice,
                f"dropped: {counted(self.dropped_no_choice, 'question')} without a wrong candidate",
            ),
            (self.dropped_untrained, f"dropped: {counted(self.dropped_untrained, 'sample')} with nothing to train on"),
            (
                self.unknown,
                f"{self.unknown:,} tokens ({_percent(self.unknown, self.tokens)}) are the unknown token: text that the "
                "tokenizer does not know",
            ),
            (
                self.foreign,
                "what looks like a control token, and is none of this tokenizer, is read as plain text: "
                f"{_named(self.foreign, 'text', self.foreign)}; are the data, or the chat template, made for another "
                "model?",
            ),
            *((self.lost[kind], f"{self.lost[kind]:,} {what}") for kind, what in LOST.items()),
            (meant, f"columns that have a meaning, but not in this format: {_named(self.unread, 'row', meant)}"),
        ]
        return [*self.remarks, *(line for holds, line in told if holds)]


def count_names(counts: Counter[str], names: Iterable[str]) -> None:
    """Counts names that come from the data, at most MOST_KEYS different ones."""
    for name in names:
        if name in counts or len(counts) < MOST_KEYS:
            counts[name] += 1


def _named(counts: Counter[str], what: str, names: Iterable[str]) -> str:
    return listed(f"{name} ({counted(counts[name], what)})" for name in names)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f}%"
