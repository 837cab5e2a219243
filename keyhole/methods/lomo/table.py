"""AdaLOMO's update of a table (embedding, head) that is visited in chunks of rows: one set of factors for all of it.

The rule is that of ops/adalomo/matrix.py, whose factors and norms are over the whole tensor. Only one chunk of a table
is on the device at a time, and its gradient exists only then; so all chunks are visited three times, in order:

    gradients   sums of g^2 over rows and over columns, of all g^2 and of all w^2;      then the moments row and col
    updates     sum of u^2,      u = g rsqrt(row / mean(row)) rsqrt(col)
    changes     w <- round(w - a (u / max(1, rms(u)) + weight_decay w)),      a = lr max(eps2, rms(w))

The gradient of a chunk is computed again each time: for the head that is two more of its products per visit, eight
instead of four in all (2 % of a step of Llama-7B, 6 % of Llama-3-8B). Work is in slices of SLICE elements, so that fp32
copies stay small. If the gradient has an inf or nan, weights and moments stay unchanged, and `bad` is set.
Legend: R rows of the table, C columns.
"""

from collections.abc import Iterator
from typing import Any

import torch

from keyhole import ops
from keyhole.ops.rounding.round import FLOAT32_MAX

SLICE = 4 * 2**20  # elements: 16 MiB of fp32
EPS1, EPS2, DECAY_RATE = 1e-30, 1e-3, -0.8  # as in ops/adalomo


class TableUpdate:
    """One update of a table. state: its moments, {"row": [R], "col": [C]}; scale: of the gradients, on the device."""

    def __init__(self, state: dict[str, torch.Tensor], t: int, scale: torch.Tensor | None) -> None:
        self.state, self.beta, self.scale = state, 1 - t**DECAY_RATE, scale
        self.rows_R, self.columns_C = torch.zeros_like(state["row"]), torch.zeros_like(state["col"])
        self.grad_squares, self.weight_squares, self.update_squares = (state["row"].new_zeros(()) for _ in range(3))
        self.row_factor_R: torch.Tensor | None = None  # rsqrt(row / mean(row)), set after the moments are updated

    @property
    def first_sums(self) -> list[torch.Tensor]:
        """The sums of the first visit."""
        return [self.rows_R, self.columns_C, self.grad_squares, self.weight_squares]

    def add_gradient(self, first: int, w: torch.Tensor, grad: torch.Tensor) -> None:
        """First visit of a chunk; first: its first row."""
        for at, (w_SC, grad_SC) in _slices(w, grad):
            square_SC = self._scaled(grad_SC).square_()
            self.rows_R[first + at : first + at + len(w_SC)] += square_SC.sum(1)
            self.columns_C += square_SC.sum(0)
            self.grad_squares += square_SC.sum()
            self.weight_squares += w_SC.float().square().sum()

    def add_update(self, first: int, grad: torch.Tensor) -> None:
        """Second visit of a chunk."""
        if self.row_factor_R is None:
            self._update_moments()
        for at, (grad_SC,) in _slices(grad):
            self.update_squares += self._update(first + at, grad_SC).square_().sum()

    def change(
        self, first: int, w: torch.Tensor, grad: torch.Tensor, lr: float, decay: float, how: dict[str, Any]
    ) -> None:
        """Third visit of a chunk: updates its weights. how: rounding and counters, as arguments of an op."""
        fine, numel = self.grad_squares <= FLOAT32_MAX, self.rows_R.numel() * self.columns_C.numel()
        step = lr * (self.weight_squares / numel).sqrt().clamp(min=EPS2)
        divisor = (self.update_squares / numel).sqrt().clamp(min=1.0)
        how["bad"] |= ~fine
        lost, offset = how["compensation"], how["offset"]
        for at, (w_SC, grad_SC) in _slices(w, grad):
            moved_SC = self._update(first + at, grad_SC).div_(divisor).add_(w_SC, alpha=decay)
            moved_SC = torch.where(fine, moved_SC, 0.0)
            where = {
                "offset": offset + at * w.shape[1],
                "compensation": None if lost is None else lost[at : at + len(w_SC)],
            }
            ops.sgd_update_(w_SC, moved_SC, lr=1.0, scale=step, **how | where | {"sum_squares": None, "bad": None})

    def _scaled(self, grad_SC: torch.Tensor) -> torch.Tensor:
        """The scaled gradient, as a new tensor in fp32."""
        scale = 1.0 if self.scale is None else self.scale
        return grad_SC.float() * scale

    def _update(self, first: int, grad_SC: torch.Tensor) -> torch.Tensor:
        """u for these rows, before the division by its rms."""
        assert self.row_factor_R is not None
        rows_S = self.row_factor_R[first : first + len(grad_SC)]
        return self._scaled(grad_SC).mul_(rows_S.unsqueeze(1)).mul_(self.state["col"].rsqrt())

    def _update_moments(self) -> None:
        row_R, col_C, fine = self.state["row"], self.state["col"], self.grad_squares <= FLOAT32_MAX
        for moment, sums, length in ((row_R, self.rows_R, col_C.numel()), (col_C, self.columns_C, row_R.numel())):
            new = moment * self.beta + (sums / length + EPS1) * (1 - self.beta)
            moment.copy_(torch.where(fine, new, moment))
        self.row_factor_R = (row_R / row_R.mean()).rsqrt()


def _slices(*tensors: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """(first row, slices of all tensors), SLICE elements or a row at a time."""
    rows = max(1, SLICE // tensors[0].shape[1])
    return ((i, [t[i : i + rows] for t in tensors]) for i in range(0, tensors[0].shape[0], rows))
