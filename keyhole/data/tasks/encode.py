"""Turns questions into rows of tokens; training and scoring use the same rows.

**Decoders** (`Encoder`): one row per candidate. Prompt and candidate are tokenised as one text, because separately they
would give tokens that the model has never seen. The candidate begins at the first position where the tokens of (prompt
+ candidate) differ from those of the prompt alone, for the candidate where that happens first, so that all candidates
are scored from the same position on. bos comes first if the tokenizer adds one.

No end token follows a candidate: it would be half of the trained tokens, and teach nothing about the choice. A task in
free text may ask for one (`end_token`). A row that is too long loses the beginning of its prompt; an answer in free
text also loses its end, if it is longer than half of a row and than the room that a short prompt leaves. Rows that are
too long may also be dropped or refused (`overlong`). For training there are two losses:

    tokens        one row per question: the prompt and the right answer, whose tokens are trained
    candidates    one row per question with all its candidates as samples; the loss compares them (model/objective.py).
                  Of several right candidates only the first is kept; the others are left out

**Classifiers** (`TextEncoder`): the task's text, or both of its texts, as one row of tokens with one label. The
tokenizer adds its special tokens: [CLS] a [SEP], or [CLS] a [SEP] b [SEP] with token types 0 and 1 if the model has
types. A row that is too long loses tokens at the end; of two texts, the longer one does. An empty text of a tokenizer
that adds no special tokens (most decoders') is one token, bos or eos: a row of padding alone has no logits.
"""

import os.path
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from keyhole.data.chat_template import ChatTemplate
from keyhole.data.collect import Encoded
from keyhole.data.dataset import IGNORED, Sample
from keyhole.data.report import Report
from keyhole.data.tasks.question import Labels, Question, Task
from keyhole.data.tasks.spec import check_loss
from keyhole.data.tokenizer import Tokenizer, bos_ids, needed, pad_token_id, tokenized
from keyhole.errors import UserError, listed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOKENS, CANDIDATES = "tokens", "candidates"


def _too_long(question: Question, tokens: int, limit: int | None) -> UserError:
    return UserError(
        f"{question.where}: {tokens:,} tokens, more than max_length={limit}; raise max_length, or set overlong to "
        "truncate or drop"
    )


def _token_for_nothing(tokenizer: Tokenizer, question: Question) -> int:
    """The token that stands for an empty text: bos or eos."""
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise UserError(f"{question.where}: an empty text, and the tokenizer has no bos to stand for it")


class Encoder:
    """Turns questions into rows of tokens, one row per candidate. truncated: how many questions were too long."""

    def __init__(
        self, tokenizer: "Tokenizer | None", max_length: int | None = None, overlong: str = "truncate"
    ) -> None:
        self.tokenizer, self.max_length, self.overlong = needed(tokenizer), max_length, overlong
        self.bos, self.pad_token_id = bos_ids(self.tokenizer), pad_token_id(self.tokenizer)
        self.template = ChatTemplate(self.tokenizer)
        self.truncated = 0

    def encode(self, questions: list[Question], end_token: bool = False) -> list[list[Sample]]:
        """The rows of each question; none for a question that is dropped. All texts are tokenised in one
        call. end_token: each row ends with eos."""
        if not questions:
            return []  # a tokenizer refuses an empty list
        prompts = [self._prompt(question) for question in questions]
        texts = [p + c for p, q in zip(prompts, questions, strict=True) for c in ("", *q.candidates)]
        tokens = iter(tokenized(self.tokenizer, texts, add_special_tokens=False, verbose=False)["input_ids"])
        end = [self.tokenizer.eos_token_id] if end_token and self.tokenizer.eos_token_id is not None else []
        return [self._rows(q, [next(tokens) for _ in range(1 + len(q.candidates))], end) for q in questions]

    def prompts(self, questions: list[Question]) -> list[list[int]]:
        """Only the prompts, for generated answers; a long prompt loses its beginning."""
        made = tokenized(self.tokenizer, [self._prompt(q) for q in questions], add_special_tokens=False, verbose=False)
        found = []
        for question, ids in zip(questions, made["input_ids"], strict=True):
            before = self._before(question, ids)
            room = len(ids) if self.max_length is None else max(1, self.max_length - len(before))
            self.truncated += len(ids) > room
            found.append([*before, *ids[max(0, len(ids) - room) :]])
        return found

    def training_rows(
        self, tasks: Sequence[Task], loss: str, train_end_token: bool | None, report: Report
    ) -> Iterator[Encoded]:
        """The rows of all questions; a row's source is the index of its task. report: counts what is cut and
        dropped."""
        for source, task in enumerate(tasks):
            check_loss(task.spec, loss)
            has_labels = len({question.candidates for question in task.questions}) == 1
            encoded = self.encode(task.questions, ends(task, train_end_token))
            for question, samples in zip(task.questions, encoded, strict=True):
                kept, right = [question.answer], None
                if loss == CANDIDATES:
                    kept = [i for i in range(len(question.candidates)) if i not in question.also]
                    right = kept.index(question.answer)
                if not samples:
                    report.dropped_overlong += 1
                elif loss == CANDIDATES and len(kept) < 2:
                    report.dropped_no_choice += 1
                else:
                    label = question.candidates[question.answer] if has_labels else None
                    yield Encoded([samples[i] for i in kept], question.where, source, right, (source, label))
        if self.overlong == "truncate":
            report.truncated = self.truncated

    def _prompt(self, question: Question) -> str:
        if isinstance(question.prompt, str):
            return question.prompt
        try:
            return self.template.write(question.prompt, prompt=True)
        except UserError as error:
            raise UserError(f"{question.where}: {error}") from None

    def _rows(self, question: Question, tokens: list[list[int]], end: list[int]) -> list[Sample]:
        alone, *full = tokens
        begin = min(len(os.path.commonprefix([alone, ids])) for ids in full)
        for ids, candidate in zip(full, question.candidates, strict=True):
            if len(ids) <= begin:
                raise UserError(f"{question.where}: candidate {candidate!r} adds no token to the prompt")
        alike = [i for i, ids in enumerate(full) if ids == full[question.answer]]
        if wrong := [i for i in alike if i not in (question.answer, *question.also)]:
            same = [repr(question.candidates[i]) for i in (question.answer, *wrong)]
            raise UserError(
                f"{question.where}: the candidates {listed(same)} have the same tokens, so that the model cannot tell "
                "them apart; choose other words, or another tokenizer"
            )
        before = self._before(question, full[0][:begin])
        longest = max(len(before) + len(ids) + len(end) for ids in full)
        if self.max_length is not None and longest > self.max_length:
            if self.overlong == "error":
                raise _too_long(question, longest, self.max_length)
            self.truncated += 1
            if self.overlong == "drop":
                return []
        return [self._cut(question, [*before, *ids, *end], len(before) + begin, len(before)) for ids in full]

    def _before(self, question: Question, prompt_ids: list[int]) -> list[int]:
        """bos as in training; there must be a token before the first scored one, which is predicted from it."""
        if self.bos and isinstance(question.prompt, str) and prompt_ids[: len(self.bos)] != self.bos:
            return self.bos
        return [] if prompt_ids else [_token_for_nothing(self.tokenizer, question)]

    def _cut(self, question: Question, ids: list[int], begin: int, keep: int) -> Sample:
        """The row with its candidate marked as trained; a long prompt loses its beginning, except for `keep` tokens."""
        limit = self.max_length or len(ids)
        if len(ids) > limit and len(question.candidates) == 1:
            ids = ids[: begin + max(limit - begin, limit // 2)]  # the rest of the row, at least half of it
        surplus = max(0, len(ids) - limit)
        if surplus and begin - keep <= surplus:
            tokens = f"a candidate has {len(ids) - begin} tokens; the model takes {self.max_length} in all"
            raise UserError(f"{question.where}: {tokens}")
        ids, begin = ids[:keep] + ids[keep + surplus :], begin - surplus
        return Sample(ids, [IGNORED] * begin + ids[begin:])


def ends(task: Task, train_end_token: bool | None) -> bool:
    """Whether the end token is trained: by the setting, else by the task file."""
    return task.spec.end_token if train_end_token is None else train_end_token


Tokenised = tuple[list[int], list[int] | None]  # ids, and types


class TextEncoder:
    def __init__(
        self,
        tokenizer: "Tokenizer | None",
        config: "PreTrainedConfig",
        max_length: int | None = None,
        overlong: str = "truncate",
    ) -> None:
        """config: the model's, which has the number of token types and the padding id."""
        self.tokenizer, self.max_length, self.overlong = needed(tokenizer), max_length, overlong
        self.has_types = (getattr(config, "type_vocab_size", None) or 0) > 1
        own = config.pad_token_id
        self.pad_token_id = own if isinstance(own, int) and own >= 0 else pad_token_id(self.tokenizer)
        self.truncated = 0

    def encode(self, questions: Sequence[Question], labels: Labels) -> list[Sample | None]:
        """A row for each question; None for one that is dropped."""
        texts = [question.texts or (str(question.prompt),) for question in questions]
        rows = self._tokens(texts)
        long = [i for i, (ids, _) in enumerate(rows) if self.max_length is not None and len(ids) > self.max_length]
        if long and self.overlong == "error":
            raise _too_long(questions[long[0]], len(rows[long[0]][0]), self.max_length)
        self.truncated += len(long)
        for i, short in zip(long, self._tokens([texts[i] for i in long], self.max_length), strict=True):
            rows[i] = short
        dropped = set(long) if self.overlong == "drop" else set()
        found: list[Sample | None] = []
        for i, (question, (ids, types)) in enumerate(zip(questions, rows, strict=True)):
            if not ids:
                ids, types = [_token_for_nothing(self.tokenizer, question)], [0] if self.has_types else None
            target = labels.target(question)
            found.append(None if i in dropped else Sample(ids, [IGNORED] * len(ids), None, types, target))
        return found

    def training_rows(self, tasks: Sequence[Task], labels: Labels, report: Report) -> Iterator[Encoded]:
        """The rows of all questions; a row's source is the index of its task. report: counts what is cut, dropped, and
        of each label."""
        targets: list[int | float] = []
        for source, task in enumerate(tasks):
            for question, row in zip(task.questions, self.encode(task.questions, labels), strict=True):
                report.dropped_overlong += row is None
                if row is not None and row.target is not None:
                    targets.append(row.target)
                    label = int(row.target) if labels.order else None
                    yield Encoded([row], question.where, source, label=(source, label))
        report.truncated = self.truncated if self.overlong == "truncate" else 0
        count = Counter(targets)
        report.labels = "labels: " + ", ".join(f"{count[i]:,} {name}" for i, name in enumerate(labels.names))
        if not labels.order and targets:
            report.labels = f"{labels.names[0]} from {min(targets):g} to {max(targets):g}"

    def _tokens(self, texts: Sequence[tuple[str, ...]], limit: int | None = None) -> list[Tokenised]:
        """Ids and types of each row. All questions have the same number of texts, because they are of one task."""
        if not texts:
            return []
        columns = [list(column) for column in zip(*texts, strict=True)]
        if limit is not None and limit <= (special := self.tokenizer.num_special_tokens_to_add(len(columns) > 1)):
            raise UserError(f"max_length: {limit} leaves no room for a text beside {special} special tokens; raise it")
        how = {} if limit is None else {"truncation": True, "max_length": limit}
        made = tokenized(self.tokenizer, *columns, return_token_type_ids=self.has_types, verbose=False, **how)
        if how:
            self.tokenizer("a")  # takes the limit away, which a fast tokenizer keeps and the model would save with it
        types = made["token_type_ids"] if self.has_types else [None] * len(texts)
        return list(zip(made["input_ids"], types, strict=True))
