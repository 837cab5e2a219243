"""Tasks scored by log-likelihood: the candidate that the model finds likeliest is its answer.

For prompt x and candidate c of n tokens, with p the model's next-token probability,

    sum(c)  = sum_t log p(c_t | x, c_<t)          mean(c) = sum(c) / n

`accuracy` chooses by the mean, as MeZO and LOMO do, since a sum favours short candidates; `accuracy_sum`
chooses by the sum. `margin` is the average over questions of mean(right) - max mean(wrong): it moves before
the accuracy does. `loss` is the NLL per token of the right candidates; `chance` the accuracy of guessing.

Where does the candidate begin? Prompt and candidate are tokenised as one text, because apart they would give
tokens that the model has never seen. The prompt ends where the tokens of (prompt + candidate) stop agreeing
with those of the prompt alone, for the candidate where that happens first, so that all candidates are judged
from the same place on. Text is preceded by bos where the tokenizer adds one, as in training. A prompt too
long for the model loses its beginning; how many did is in the result.
"""

import os.path
from dataclasses import dataclass
from typing import Any

import torch

from keyhole.data.capacity import check_ids, check_max_length, context_length
from keyhole.data.chat_template import ChatTemplate, bos_ids
from keyhole.data.dataset import IGNORED, Sample
from keyhole.errors import UserError
from keyhole.eval.rows import not_finite, score_rows
from keyhole.eval.tasks import Question, Task
from keyhole.model.model import Model


@dataclass(frozen=True)
class TaskScore:
    """The result of a task; `predictions` are the candidates chosen by the mean, question by question."""

    name: str
    questions: int
    accuracy: float
    accuracy_sum: float
    chance: float
    margin: float
    loss: float
    truncated: int
    predictions: list[int]


def score_task(model: Model, task: Task, *, max_length: int | None = None, **options: Any) -> TaskScore:
    """Scores all candidates of all questions. options: batch_tokens, passes, watch (rows.py)."""
    check_max_length(max_length, model.config, model.module)
    encoder = Encoder(model.tokenizer, max_length or context_length(model.config))
    rows_by_question = encoder.encode(task.questions)
    for question, rows in zip(task.questions, rows_by_question, strict=True):
        check_ids([i for row in rows for i in row.input_ids], question.where, model.source, model.config)
    nll_R, count_R = score_rows(model, [row for rows in rows_by_question for row in rows], **options)
    sizes = [len(rows) for rows in rows_by_question]
    sums = [-nll for nll in nll_R.split(sizes)]
    means = [-nll / count for nll, count in zip(nll_R.split(sizes), count_R.split(sizes), strict=True)]
    _check_finite(model, task.questions, sums)
    return _score(task, sums, means, count_R.split(sizes), encoder.truncated)


def _score(task: Task, sums: list, means: list, counts: tuple, truncated: int) -> TaskScore:
    answers = [question.answer for question in task.questions]
    predictions = [int(mean.argmax()) for mean in means]
    others = [torch.cat([mean[:a], mean[a + 1 :]]).max() for mean, a in zip(means, answers, strict=True)]
    margins = [mean[a] - other for mean, a, other in zip(means, answers, others, strict=True)]
    number = len(answers)
    return TaskScore(
        name=task.name,
        questions=number,
        accuracy=sum(p == a for p, a in zip(predictions, answers, strict=True)) / number,
        accuracy_sum=sum(int(s.argmax()) == a for s, a in zip(sums, answers, strict=True)) / number,
        chance=sum(1 / len(question.candidates) for question in task.questions) / number,
        margin=float(torch.stack(margins).mean()),
        loss=-float(sum(s[a] for s, a in zip(sums, answers, strict=True)))
        / int(sum(c[a] for c, a in zip(counts, answers, strict=True))),
        truncated=truncated,
        predictions=predictions,
    )


def _check_finite(model: Model, questions: list[Question], sums: list[torch.Tensor]) -> None:
    bad = [question for question, score in zip(questions, sums, strict=True) if not score.isfinite().all()]
    if bad:
        share = f"{len(bad)} of {len(questions)} questions"
        raise not_finite(model, f"{bad[0].where}: scores that are not finite ({share})")


class Encoder:
    """Questions into rows of tokens, one row per candidate."""

    def __init__(self, tokenizer: Any, max_length: int | None = None) -> None:
        if tokenizer is None:
            raise UserError("model: the directory has no tokenizer; copy its tokenizer files in")
        self.tokenizer, self.max_length = tokenizer, max_length
        self.bos = bos_ids(tokenizer)
        self.template = ChatTemplate(tokenizer)
        self.truncated = 0

    def encode(self, questions: list[Question]) -> list[list[Sample]]:
        """The rows of each question. All texts go through the tokenizer in one call."""
        prompts = [self._prompt(question) for question in questions]
        texts = [p + c for p, q in zip(prompts, questions, strict=True) for c in ("", *q.candidates)]
        tokens = iter(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
        return [self._rows(q, [next(tokens) for _ in range(1 + len(q.candidates))]) for q in questions]

    def _prompt(self, question: Question) -> str:
        if isinstance(question.prompt, str):
            return question.prompt
        try:
            return self.template.render(question.prompt, None, prompt=True)
        except Exception as error:  # templates raise what they like
            raise UserError(f"{question.where}: the chat template cannot write the prompt: {error}") from None

    def _rows(self, question: Question, tokens: list[list[int]]) -> list[Sample]:
        alone, *full = tokens
        begin = min(len(os.path.commonprefix([alone, ids])) for ids in full)
        for ids, candidate in zip(full, question.candidates, strict=True):
            if len(ids) <= begin:
                raise UserError(f"{question.where}: candidate {candidate!r} adds no token to the prompt")
        before = self._before(question, full[0][:begin])
        rows = [self._cut(question, [*before, *ids], len(before) + begin, len(before)) for ids in full]
        longest = max(len(before) + len(ids) for ids in full)
        self.truncated += self.max_length is not None and longest > self.max_length
        return rows

    def _before(self, question: Question, prompt_ids: list[int]) -> list[int]:
        """bos as in training; something must stand before the first scored token, or nothing predicts it."""
        is_chat = not isinstance(question.prompt, str)
        if self.bos and not is_chat and prompt_ids[: len(self.bos)] != self.bos:
            return self.bos
        if prompt_ids:
            return []
        first = [i for i in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id) if i is not None]
        if not first:
            raise UserError(f"{question.where}: an empty prompt, and the tokenizer has no bos to begin with")
        return first[:1]

    def _cut(self, question: Question, ids: list[int], begin: int, keep: int) -> Sample:
        """The row with its candidate trained; a long prompt loses its beginning, except for `keep` tokens."""
        surplus = len(ids) - self.max_length if self.max_length else 0
        if surplus > 0:
            if begin - keep <= surplus:
                raise UserError(
                    f"{question.where}: a candidate has {len(ids) - begin} tokens; the model takes "
                    f"{self.max_length} in all"
                )
            ids, begin = ids[:keep] + ids[keep + surplus :], begin - surplus
        return Sample(ids, [IGNORED] * begin + ids[begin:])
