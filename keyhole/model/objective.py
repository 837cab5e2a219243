"""The objective: the tokens of a batch, or the choice between candidates (MeZO's loss for classification).

An objective computes the loss of a step from the NLL of every trained token, and the derivative with respect to each
NLL. The backward pass needs nothing else, so every method supports both objectives, resident or streamed.

    tokens        loss = 1/N sum_t nll_t                                       d loss / d nll_t = 1 / N
    candidates    s_r = -1/n_r sum of nll_t over the n_r trained tokens of row r            (mean log-likelihood)
                  p = softmax of s over the candidates of a question
                  loss = -1/Q sum over questions of log p[right]               d loss / d nll_t = (y_r - p_r) / (n_r Q)

where y_r is 1 for the right candidate of a question and 0 for the others. N and Q count all micro-batches of a step.
A micro-batch holds all candidates of its questions as rows of one batch, which pass each unit in one visit.

A batch of candidates has two more entries, one number per row: `question` (0, 0, 1, 1, 1, ...: ascending from 0, one
entry per candidate) and `answer` (1 for the right candidate, else 0). Sums over a row or a question are computed in a
padded table, [rows, most tokens] or [questions, most candidates], because index_add_ has no fixed order on a GPU. The
indices of the tables are computed on the host. Bytes: a few dozen per trained token.
Legend: B rows, N trained tokens, Q questions, C most candidates of a question.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from keyhole.errors import UserError

PER_ROW = ("question", "answer")


@dataclass
class Candidates:
    """The indices of tokens and rows in the padded tables, on the device."""

    row_N: torch.Tensor
    place_N: torch.Tensor  # index into the flattened [B, most tokens of a row]
    count_B: torch.Tensor  # number of trained tokens of a row, float32
    place_B: torch.Tensor  # index into the flattened [Q, C]
    is_right_B: torch.Tensor  # 1.0 for right candidates, else 0.0
    right_Q: torch.Tensor  # the index of the right candidate of a question
    most_tokens: int
    most_candidates: int
    question_count: int

    def scores(self, nll_N: torch.Tensor) -> torch.Tensor:
        """[Q, C] mean log-likelihoods of the candidates; -inf if a question has fewer than C."""
        table = nll_N.new_zeros(self.count_B.numel() * self.most_tokens).index_copy(0, self.place_N, nll_N)
        score_B = table.view(-1, self.most_tokens).sum(dim=1) / -self.count_B
        empty = nll_N.new_full((self.question_count * self.most_candidates,), float("-inf"))
        return empty.index_copy(0, self.place_B, score_B).view(-1, self.most_candidates)


def loss_sum(nll_N: torch.Tensor, candidates: Candidates | None) -> torch.Tensor:
    """The summed loss of a batch, before the division by N or Q. Differentiable."""
    if candidates is None:
        return nll_N.sum()
    return F.cross_entropy(candidates.scores(nll_N), candidates.right_Q, reduction="sum")


@torch.no_grad()
def token_weights(nll_N: torch.Tensor, candidates: Candidates | None) -> torch.Tensor | None:
    """[N]: the derivative of `loss_sum` with respect to every nll; None if all are 1."""
    if candidates is None:
        return None
    p_B = candidates.scores(nll_N).softmax(dim=1).flatten()[candidates.place_B]
    return ((candidates.is_right_B - p_B) / candidates.count_B)[candidates.row_N]


def places(question_B: torch.Tensor, answer_B: torch.Tensor, row_N: torch.Tensor) -> Candidates:
    """The table indices of one batch, on the device of its tensors. row_N: the row of each trained token, ascending."""
    count_B = torch.bincount(row_N, minlength=question_B.numel())
    size_Q = torch.bincount(question_B)
    most_tokens, most_candidates = int(count_B.max()), int(size_Q.max())
    place_B = question_B * most_candidates + _place_in_group(question_B, size_Q)
    return Candidates(
        row_N=row_N,
        place_N=row_N * most_tokens + _place_in_group(row_N, count_B),
        count_B=count_B.float(),
        place_B=place_B,
        is_right_B=answer_B.float(),
        right_Q=place_B[answer_B == 1] % most_candidates,
        most_tokens=most_tokens,
        most_candidates=most_candidates,
        question_count=size_Q.numel(),
    )


def _place_in_group(group: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """0, 1, 2, ... within each run of equal numbers of an ascending list."""
    return torch.arange(group.numel(), device=group.device) - (size.cumsum(0) - size)[group]


def check_candidates(question_B: torch.Tensor, answer_B: torch.Tensor, trained_B: torch.Tensor) -> None:
    """UserError if rows are not valid candidates of questions. trained_B: number of trained tokens per row. GPU tensors
    are not checked: reading them would synchronize."""
    rows = trained_B.numel()
    for name, x in zip(PER_ROW, (question_B, answer_B), strict=True):
        if not isinstance(x, torch.Tensor) or tuple(x.shape) != (rows,) or x.dtype != torch.int64:
            found = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise UserError(
                f"batch: {name} is {found}; a torch.int64 tensor with one number per row, [{rows}], is needed"
            )
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
