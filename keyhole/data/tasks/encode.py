"""Turns questions into rows of tokens, one per candidate; training and scoring use the same rows.

Prompt and candidate are tokenised as one text, because separately they would give tokens that the model has never seen.
The candidate begins at the first position where the tokens of (prompt + candidate) differ from those of the prompt
alone, for the candidate where that happens first, so that all candidates are scored from the same position on. bos
comes first if the tokenizer adds one.

No end token follows a candidate: it would be half of the trained tokens, and teach nothing about the choice. A task in
free text may ask for one (`end_token`). A row that is too long loses the beginning of its prompt; an answer in free
text also loses its end, if it is longer than half of a row and than the room that a short prompt leaves. Rows that are
too long may also be dropped or refused (`overlong`).

For training (`question_rows`) there are two losses:

    tokens        one row per question: the prompt and the right answer, whose tokens are trained
    candidates    one row per question with all its candidates as samples; the loss compares them (model/objective.py).
                  Of several right candidates only the first is kept; the others are left out
"""

import os.path
from collections.abc import Iterator, Sequence

import numpy as np

from keyhole.data.chat_template import ChatTemplate
from keyhole.data.collect import Encoded
from keyhole.data.dataset import IGNORED, Sample
from keyhole.data.report import Report
from keyhole.data.tasks.question import Question, Task
from keyhole.data.tasks.spec import check_loss
from keyhole.data.tokens import Tokenizer, bos_ids
from keyhole.errors import UserError, listed

TOKENS, CANDIDATES = "tokens", "candidates"


class Encoder:
    """Turns questions into rows of tokens, one row per candidate."""

    def __init__(self, tokenizer: Tokenizer, max_length: int | None = None, overlong: str = "truncate") -> None:
        if tokenizer is None:
            raise UserError("model: the directory has no tokenizer; copy its tokenizer files in")
        self.tokenizer, self.max_length, self.overlong = tokenizer, max_length, overlong
        self.bos = bos_ids(tokenizer)
        self.template = ChatTemplate(tokenizer)
        self.truncated = 0

    def encode(self, questions: list[Question], end_token: bool = False) -> list[list[Sample]]:
        """The rows of each question; none for a question that is dropped. All texts are tokenised in one
        call. end_token: each row ends with eos."""
        if not questions:
            return []  # a tokenizer refuses an empty list
        prompts = [self._prompt(question) for question in questions]
        texts = [p + c for p, q in zip(prompts, questions, strict=True) for c in ("", *q.candidates)]
        tokens = iter(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
        end = [self.tokenizer.eos_token_id] if end_token and self.tokenizer.eos_token_id is not None else []
        return [self._rows(q, [next(tokens) for _ in range(1 + len(q.candidates))], end) for q in questions]

    def prompts(self, questions: list[Question]) -> list[list[int]]:
        """Only the prompts, for generated answers; a long prompt loses its beginning."""
        texts = [self._prompt(question) for question in questions]
        made = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [self._short(question, ids) for question, ids in zip(questions, made, strict=True)]

    def _short(self, question: Question, ids: list[int]) -> list[int]:
        before = self._before(question, ids)
        room = len(ids) if self.max_length is None else max(1, self.max_length - len(before))
        self.truncated += len(ids) > room
        return [*before, *ids[max(0, len(ids) - room) :]]

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
                raise UserError(
                    f"{question.where}: {longest:,} tokens, more than max_length={self.max_length}; raise max_length, "
                    "or set overlong to truncate or drop"
                )
            self.truncated += 1
            if self.overlong == "drop":
                return []
        return [self._cut(question, [*before, *ids, *end], len(before) + begin, len(before)) for ids in full]

    def _before(self, question: Question, prompt_ids: list[int]) -> list[int]:
        """bos as in training; there must be a token before the first scored one, which is predicted from it."""
        is_chat = not isinstance(question.prompt, str)
        if self.bos and not is_chat and prompt_ids[: len(self.bos)] != self.bos:
            return self.bos
        return [] if prompt_ids else [token_for_nothing(self.tokenizer, question)]

    def _cut(self, question: Question, ids: list[int], begin: int, keep: int) -> Sample:
        """The row with its candidate marked as trained; a long prompt loses its beginning, except for `keep` tokens."""
        limit = self.max_length or len(ids)
        surplus = len(ids) - limit
        if surplus > 0 and len(question.candidates) == 1:
            answer = max(limit - begin, limit // 2)  # the rest of the row, at least half of it
            ids = ids[: begin + answer]
            surplus = len(ids) - limit
        if surplus > 0:
            if begin - keep <= surplus:
                raise UserError(
                    f"{question.where}: a candidate has {len(ids) - begin} tokens; the model takes "
                    f"{self.max_length} in all"
                )
            ids, begin = ids[:keep] + ids[keep + surplus :], begin - surplus
        return Sample(ids, [IGNORED] * begin + ids[begin:])


def token_for_nothing(tokenizer: Tokenizer, question: Question) -> int:
    """The token that stands for an empty text: bos or eos."""
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise UserError(f"{question.where}: an empty text, and the tokenizer has no bos to stand for it")


def question_rows(
    tasks: Sequence[Task], encoder: Encoder, loss: str, train_end_token: bool | None, report: Report
) -> Iterator[Encoded]:
    """The rows of all questions, for training; a row's source is the index of its task. report: counts what is cut and
    dropped."""
    for source, task in enumerate(tasks):
        if task.spec is not None:
            check_loss(task.spec, loss)
        has_labels = len({question.candidates for question in task.questions}) == 1
        encoded = encoder.encode(task.questions, ends(task, train_end_token))
        for question, samples in zip(task.questions, encoded, strict=True):
            kept = [question.answer]
            if loss == CANDIDATES:
                kept = [i for i in range(len(question.candidates)) if i not in question.also]
            report.dropped_overlong += not samples
            report.dropped_no_choice += bool(samples) and loss == CANDIDATES and len(kept) < 2
            if not samples or (loss == CANDIDATES and len(kept) < 2):
                continue
            rows = [
                (np.array(samples[i].input_ids, dtype=np.int32), np.array(samples[i].labels) != IGNORED) for i in kept
            ]
            label = question.candidates[question.answer] if has_labels else None
            right = kept.index(question.answer) if loss == CANDIDATES else None
            yield Encoded(rows, question.where, source, right, label=(source, label))
    if encoder.overlong == "truncate":
        report.truncated = report.cut_prompts = encoder.truncated


def ends(task: Task, train_end_token: bool | None) -> bool:
    """Whether the end token is trained: by the setting, else by the task file."""
    return task.spec is not None and task.spec.end_token if train_end_token is None else train_end_token
