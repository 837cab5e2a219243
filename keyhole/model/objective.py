"""The losses of a step, one row of the table each: what a batch needs, the loss, its derivative, its denominator.

The head gives the NLL of every trained token (of a classifier: of every row, from its label). A loss is a function of
these numbers alone, so every method has every loss, resident or streamed: the backward pass needs only the derivative
with respect to each NLL. A batch has the first loss of LOSSES whose entries it holds.

    tokens        loss = 1/N sum_t nll_t                                       d loss / d nll_t = 1 / N
    candidates    s_r = -1/n_r sum of nll_t over the n_r trained tokens of row r            (mean log-likelihood)
                  p = softmax of s over the candidates of a question
                  loss = -1/Q sum over questions of log p[right]               d loss / d nll_t = (y_r - p_r) / (n_r Q)

Candidates are MeZO's loss for classification; y_r is 1 for the right candidate of a question and 0 for the others. N
and Q count all micro-batches of a step. A micro-batch holds all candidates of its questions as rows of one batch, which
pass each unit in one visit: beside the tokens it has two numbers per row, `question` (0, 0, 1, 1, 1, ...: ascending
from 0, one entry per candidate) and `answer` (1 for the right candidate, else 0). Sums over a row or a question are
computed in a padded table, [rows, most tokens] or [questions, most candidates], because index_add_ has no fixed order
on a GPU. The indices of the tables are computed on the host. Bytes: a few dozen per trained token.
Legend: B rows, N trained tokens, G groups (rows, questions), Q questions, C most candidates of a question.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch.nn import functional as F

from keyhole.errors import UserError


@dataclass
class Tokens:
    """The sum over trained tokens, and what every loss has. A subclass is a row of the table."""

    entries: ClassVar[tuple[str, ...]] = ()
    """What a batch holds of it beside its tokens: one number per row each."""
    trains: ClassVar[str] = "by tokens"

    row_N: torch.Tensor  # the row of each trained token, ascending
    row_count: int
    count: int  # the number that the summed loss is divided by, over all micro-batches of a step

    @classmethod
    def check(cls, batch: Mapping[str, torch.Tensor], trained_B: torch.Tensor) -> None:
        """UserError if its entries do not fit the batch. trained_B: the number of trained tokens per row."""

    @classmethod
    def of(cls, batch: Mapping[str, torch.Tensor], row_N: torch.Tensor) -> Self:
        """That of one batch, where the batch is."""
        return cls(row_N, len(batch["labels"]), row_N.numel())

    @classmethod
    def ends(cls, batch: Mapping[str, torch.Tensor]) -> list[int]:
        """Where the rows of a batch may be parted: the ends of rows that belong together."""
        return list(range(1, len(batch["labels"]) + 1))

    @classmethod
    def part(cls, batch: Mapping[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
        """These rows as a batch."""
        return {name: x[begin:end] for name, x in batch.items()}

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        moved: dict[str, Any] = {name: move(x) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return replace(self, **moved)

    def total(self, nll_N: torch.Tensor) -> torch.Tensor:
        """The summed loss of the batch, before the division by `count`. Differentiable."""
        return nll_N.sum()

    def weights(self, nll_N: torch.Tensor) -> torch.Tensor | None:
        """[N]: the derivative of `total` with respect to every nll; None if all are 1."""
        return None

    def sum_by_row(self, x_N: torch.Tensor) -> torch.Tensor:
        """[B] sums over the trained tokens of each row, in a fixed order (index_add_ on a GPU has none). A number that
        is not finite stays in its row: times 0 it would be NaN in all others."""
        in_row_BN, nothing = self._in_row(), x_N.new_zeros(())
        finite_N = torch.isfinite(x_N)
        sum_B = in_row_BN.to(x_N.dtype) @ torch.where(finite_N, x_N, nothing)
        return sum_B + torch.where(in_row_BN & ~finite_N, x_N, nothing).sum(dim=1)

    def count_by_row(self) -> torch.Tensor:
        """[B] number of trained tokens per row."""
        return self._in_row().sum(dim=1)

    def _in_row(self) -> torch.Tensor:
        """[B, N] whether a trained token belongs to a row."""
        return torch.arange(self.row_count, device=self.row_N.device)[:, None] == self.row_N


@dataclass
class Candidates(Tokens):
    """A choice between the rows of a question: indices of tokens and rows in the padded tables."""

    entries = ("question", "answer")
    trains = "by candidates"

    place_N: torch.Tensor  # index into the flattened [B, most tokens of a row]
    tokens_B: torch.Tensor  # number of trained tokens of a row, float32
    place_B: torch.Tensor  # index into the flattened [Q, C]
    is_right_B: torch.Tensor  # 1.0 for right candidates, else 0.0
    right_Q: torch.Tensor  # the index of the right candidate of a question
    most_tokens: int
    most_candidates: int

    @classmethod
    def of(cls, batch: Mapping[str, torch.Tensor], row_N: torch.Tensor) -> Self:
        question_B, answer_B = batch["question"], batch["answer"]
        tokens_B, size_Q = torch.bincount(row_N, minlength=question_B.numel()), torch.bincount(question_B)
        most_tokens, most_candidates = int(tokens_B.max()), int(size_Q.max())
        place_B = question_B * most_candidates + _place_in_group(question_B, size_Q)
        return cls(
            row_N=row_N,
            row_count=question_B.numel(),
            count=size_Q.numel(),
            place_N=row_N * most_tokens + _place_in_group(row_N, tokens_B),
            tokens_B=tokens_B.float(),
            place_B=place_B,
            is_right_B=answer_B.float(),
            right_Q=place_B[answer_B == 1] % most_candidates,
            most_tokens=most_tokens,
            most_candidates=most_candidates,
        )

    @classmethod
    def ends(cls, batch: Mapping[str, torch.Tensor]) -> list[int]:
        """The candidates of a question are never parted."""
        return [int(end) for end in torch.bincount(batch["question"]).cumsum(0)]

    @classmethod
    def part(cls, batch: Mapping[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
        part = super().part(batch, begin, end)
        return part | {"question": part["question"] - part["question"][0]}

    def scores(self, nll_N: torch.Tensor) -> torch.Tensor:
        """[Q, C] mean log-likelihoods of the candidates; -inf if a question has fewer than C."""
        table = nll_N.new_zeros(self.row_count * self.most_tokens).index_copy(0, self.place_N, nll_N)
        score_B = table.view(-1, self.most_tokens).sum(dim=1) / -self.tokens_B
        empty = nll_N.new_full((self.count * self.most_candidates,), float("-inf"))
        return empty.index_copy(0, self.place_B, score_B).view(-1, self.most_candidates)

    def total(self, nll_N: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.scores(nll_N), self.right_Q, reduction="sum")

    @torch.no_grad()
    def weights(self, nll_N: torch.Tensor) -> torch.Tensor:
        p_B = self.scores(nll_N).softmax(dim=1).flatten()[self.place_B]
        return ((self.is_right_B - p_B) / self.tokens_B)[self.row_N]

    @classmethod
    def check(cls, batch: Mapping[str, torch.Tensor], trained_B: torch.Tensor) -> None:
        """Rows must be valid candidates of questions. GPU tensors are not looked at: that would synchronize."""
        rows = trained_B.numel()
        for name in cls.entries:
            x = batch[name]
            if not isinstance(x, torch.Tensor) or tuple(x.shape) != (rows,) or x.dtype != torch.int64:
                found = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
                raise UserError(
                    f"batch: {name} is {found}; a torch.int64 tensor with one number per row, [{rows}], is needed"
                )
        question_B, answer_B = batch["question"], batch["answer"]
        if question_B.device.type != "cpu" or answer_B.device.type != "cpu":
            return
        steps = question_B.diff()
        if int(question_B[0]) != 0 or not bool(((steps == 0) | (steps == 1)).all()):
            raise UserError(
                f"batch: question is {question_B.tolist()}; the candidates of a question must be neighbours, and "
                "questions be numbered 0, 1, 2, ... in every batch"
            )
        if not bool(((answer_B == 0) | (answer_B == 1)).all()):
            raise UserError(
                f"batch: answer holds {answer_B.tolist()}; 1 for the right candidate and 0 for the others is needed"
            )
        size_Q = torch.bincount(question_B)
        right_Q = torch.bincount(question_B[answer_B == 1], minlength=size_Q.numel())
        for q in ((size_Q < 2) | (right_Q != 1)).nonzero()[:1, 0].tolist():
            raise UserError(
                f"batch: question {q} has {int(size_Q[q])} rows of which {int(right_Q[q])} are right; at least two "
                "candidates and exactly one right answer are needed"
            )
        for row in (trained_B == 0).nonzero()[:1, 0].tolist():
            raise UserError(
                f"batch: row {row} has no trained token, so this candidate has no likelihood; its labels must hold at "
                "least one token after the first position (a longer max_length, where it was cut off)"
            )


def _place_in_group(group: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """0, 1, 2, ... within each run of equal numbers of an ascending list."""
    return torch.arange(group.numel(), device=group.device) - (size.cumsum(0) - size)[group]


LOSSES: dict[str, type[Tokens]] = {"candidates": Candidates, "tokens": Tokens}
PER_ROW = tuple(name for loss in LOSSES.values() for name in loss.entries)


def loss_of(batch: Mapping[str, torch.Tensor]) -> type[Tokens]:
    """The row of the table for a batch: the first of which it holds an entry. (Tokens have none: the last.)"""
    return next(loss for loss in LOSSES.values() if not loss.entries or any(name in batch for name in loss.entries))
