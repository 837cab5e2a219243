"""A report of a few lines: what was read of the data, and how it was changed.

Everything that is lost between the file and the loss is counted and reported as a warning: cut answers, dropped
samples, tool calls, reasoning, system prompts, questions or documents that the chat template does not write.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from keyhole.data.formats import WITH_A_MEANING
from keyhole.errors import listed, printable
from keyhole.machine.text import counted

MOST_FILES = 5
MOST_KEYS = 100  # names from the data that are counted


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
    windows: int = 0  # the samples that they became
    truncated: int = 0
    cut_trained_tokens: int = 0
    cut_prompts: int = 0
    dropped_overlong: int = 0
    dropped_untrained: int = 0
    dropped_no_choice: int = 0
    duplicates: int = 0
    lost_calls: int = 0
    lost_reasoning: int = 0
    lost_text: int = 0
    lost_context: int = 0
    lost_tools: int = 0
    lost_documents: int = 0
    lost_variables: dict[str, int] = field(default_factory=dict)  # variable of the chat template -> chats
    unread: dict[str, int] = field(default_factory=dict)  # column that its layout does not use -> rows
    lost_keys: dict[str, int] = field(default_factory=dict)  # key of a turn -> turns
    endless: bool = False  # no answer has an end token, because the tokenizer has none
    empty: int = 0
    unheard: int = 0
    straddling: int = 0
    unpredicted: int = 0
    unknown: int = 0  # tokens that stand for text that the tokenizer does not know
    missing: str = ""  # characters that it leaves out
    foreign: dict[str, int] = field(default_factory=dict)  # control token of another tokenizer -> texts
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
    remarks: list[str] = field(default_factory=list)  # about the files (listing.py)

    def lines(self) -> list[str]:
        """The counts as lines, losses last; zero counts are left out."""
        files = list(self.formats.items())
        out = [f"{printable(name, 300)}: {why}" for name, why in files[:MOST_FILES]]
        out += [f"... and {len(files) - MOST_FILES} more files"] if len(files) > MOST_FILES else []
        out += [f"template: {self.template}"] if self.template else []
        share = _percent(self.trained_tokens, self.tokens)
        trained = f"{self.trained_tokens:,} trained on ({share}, train_on={self.train_on})"
        out.append(
            f"{counted(self.samples, 'sample')} of {counted(self.read, 'row')} read, "
            f"{self.tokens:,} tokens (longest sample {self.longest:,}), {self.labels or trained}"
        )
        out += ["only the first rows were read; `keyhole train --dry-run` counts all of them"] if self.partial else []
        if others := [name for name in self.unread if name not in WITH_A_MEANING]:
            out.append(f"columns that are not used: {self._counted(others)}")
        out += [self.mixture] if self.mixture else []
        out += [f"tokens read from {printable(self.cached, 300)} (data_cache)"] if self.cached else []
        if self.split:
            out.append(
                f"split: {counted(self.split, 'text')} longer than max_length={self.max_length} into "
                f"{counted(self.windows, 'sample')}"
            )
        if self.duplicates:
            out.append(f"dedup: {self.duplicates:,} samples are the same as an earlier one and are left out")
        if self.straddling:
            out.append(f"{self.straddling:,} samples have a token across prompt and answer; it counts as answer")
        if self.packed:
            fill = _percent(self.tokens, self.rows * (self.max_length or 1))
            out.append(f"packed into {counted(self.rows, 'row')} of {self.max_length} tokens, {fill} filled")
        return out + [f"warning: {loss}" for loss in self.losses()]

    def losses(self) -> list[str]:
        """What is lost between the files and the loss, a line for each kind."""
        out = [*self.remarks]
        if self.unused:
            out.append(
                f"{' and '.join(self.unused)} {'have' if len(self.unused) > 1 else 'has'} no effect: no row is a chat"
            )
        return out + self._cut() + self._odd_tokens() + self._unwritten() + self._odd_answers()

    def _cut(self) -> list[str]:
        """Samples that are cut or dropped."""
        out, limit = [], f"max_length={self.max_length}"
        if self.truncated and self.labels:
            out.append(f"truncated to {limit}: {counted(self.truncated, 'sample')}")
        elif self.truncated:
            whole = self.trained_tokens + self.cut_trained_tokens
            prompts = f", {self.cut_prompts:,} of them at the beginning of the prompt" if self.cut_prompts else ""
            out.append(
                f"truncated to {limit}: {counted(self.truncated, 'sample')}{prompts}, "
                f"{_percent(self.cut_trained_tokens, whole)} of the trained tokens cut "
                f"({self.cut_trained_tokens:,})"
            )
        if self.dropped_overlong:
            out.append(f"dropped: {counted(self.dropped_overlong, 'sample')} longer than {limit}")
        if self.dropped_no_choice:
            out.append(f"dropped: {counted(self.dropped_no_choice, 'question')} without a wrong candidate")
        if self.dropped_untrained:
            out.append(f"dropped: {counted(self.dropped_untrained, 'sample')} with nothing to train on")
        return out

    def _odd_tokens(self) -> list[str]:
        """Tokens that are not trained on, or do not stand for their text."""
        out = []
        if self.unpredicted:
            out.append(
                f"the first token of {counted(self.unpredicted, 'sample')} belongs to the answer, and is not trained "
                "on: no token is before it (the prompt is one token with the answer, and the tokenizer adds no bos)"
            )
        if self.unknown:
            out.append(
                f"{self.unknown:,} tokens ({_percent(self.unknown, self.tokens)}) are the unknown token: text that the "
                "tokenizer does not know"
            )
        if self.missing:
            out.append(f"the tokenizer has no token for these characters, and leaves them out: {listed(self.missing)}")
        if self.foreign:
            named = listed(f"{word} ({counted(count, 'text')})" for word, count in self.foreign.items())
            out.append(
                f"what looks like a control token, and is none of this tokenizer, is read as plain text: {named}; are "
                "the data, or the chat template, made for another model?"
            )
        return out

    def _unwritten(self) -> list[str]:
        """What the rows hold, and the chat template or the format of the data leaves out."""
        without = "the chat template does not write"
        lost = (
            (self.lost_calls, f"answers call tools, which {without}; these answers are not trained on"),
            (self.lost_reasoning, f"answers have reasoning that {without}; they are trained on without it"),
            (self.lost_text, f"answers have text that {without} as it stands"),
            (self.lost_context, f"turns of system, user or tools have text that {without} as it stands"),
            (self.lost_tools, f"chats have tools whose descriptions {without}"),
            (self.lost_documents, f"chats have documents that {without}"),
        )
        out = [f"{count:,} {what}" for count, what in lost if count]
        if self.lost_variables:
            named = listed(f"{name} ({counted(count, 'chat')})" for name, count in self.lost_variables.items())
            out.append(f"chat_template_kwargs has variables that the chat template does not read: {named}")
        if meant := [name for name in self.unread if name in WITH_A_MEANING]:
            out.append(f"columns that have a meaning, but not in this format of data: {self._counted(meant)}")
        if self.lost_keys:
            named = listed(f"{name} ({count:,})" for name, count in self.lost_keys.items())
            out.append(f"keys of turns, with texts that {without}: {named}")
        return out

    def _odd_answers(self) -> list[str]:
        """Answers that teach something else than what was meant."""
        out = []
        if self.endless:
            out.append(
                "no end token is trained, so the model does not learn to stop: the tokenizer has no eos (eos_token in "
                "tokenizer_config.json)"
            )
        if self.empty:
            are = "is empty: it teaches" if self.empty == 1 else "are empty: they teach"
            out.append(f"{counted(self.empty, 'answer')} {are} the model to say nothing")
        if self.unheard:
            out.append(f"{self.unheard:,} turns have train: true, but are no answers; only answers are trained on")
        return out

    def _counted(self, columns: list[str]) -> str:
        return listed(f"{name} ({counted(self.unread[name], 'row')})" for name in columns)


def count_names(counts: dict[str, int], names: Iterable[str]) -> None:
    """Counts names that come from the data, at most MOST_KEYS different ones."""
    for name in names:
        if name in counts or len(counts) < MOST_KEYS:
            counts[name] = counts.get(name, 0) + 1


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f}%"
