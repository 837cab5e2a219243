"""AdaLOMO's update of matrices that are sharded over ranks: ranks exchange sums, not gradients.

The rule (ops/adalomo/matrix.py) needs sums over a matrix [R, C] before an element can be updated: of g^2 over rows and
over columns, of w^2, and of u^2. Each rank computes the sums over its own elements, these are added over the ranks, and
each rank updates its own elements. It is the update of a table in chunks of rows (table.py), with ranks in place of
chunks, except that a rank's elements may begin and end within a row. So its rows are padded with zeros, which add
nothing to any sum and are not updated.

Over the network per matrix: R + C + 3 numbers in float32, summed by all ranks in the same order, so that the moments,
which every rank keeps whole, have the same bits everywhere. Each unit takes two exchanges: before and after the
moments. Bytes on the device: this rank's part of the unit, in float32 and once more in the dtype of the weights.
"""

from dataclasses import dataclass
from typing import Any

import torch

from keyhole.methods.lomo.table import TableUpdate
from keyhole.model.structure.layout import FlatTensor
from keyhole.ranks import Ranks


@dataclass(frozen=True)
class Piece:
    """[begin, end) of a matrix, possibly empty. w: the whole matrix, on the device; grad: of these elements."""

    tensor: FlatTensor
    begin: int
    end: int
    w: torch.Tensor
    grad: torch.Tensor

    @property
    def first_row(self) -> int:
        return self.begin // self.tensor.shape[1]

    def as_rows(self, elements: torch.Tensor) -> torch.Tensor:
        """The rows that contain these elements, zero elsewhere."""
        columns = self.tensor.shape[1]
        rows = -(-self.end // columns) - self.first_row if self.begin < self.end else 0
        found = elements.new_zeros(rows, columns)
        self.of_rows(found).copy_(elements)
        return found

    def of_rows(self, rows_SC: torch.Tensor) -> torch.Tensor:
        """These elements, cut from their rows."""
        first = self.begin - self.first_row * self.tensor.shape[1]
        return rows_SC.view(-1)[first : first + self.end - self.begin]


def update(method: Any, pieces: list[Piece], ranks: Ranks, changed: torch.Tensor) -> None:
    """One update of these matrices, whose other elements are on other ranks. method: AdaLOMO; changed: counts the
    weights that change on this rank."""
    if not pieces:
        return
    weights = [piece.as_rows(piece.w.view(-1)[piece.begin : piece.end]) for piece in pieces]
    grads = [piece.as_rows(piece.grad) for piece in pieces]
    updates = []
    for piece, w_SC, grad_SC in zip(pieces, weights, grads, strict=True):
        tensor = piece.tensor
        one = TableUpdate(method._moments_of(tensor, w_SC.device), method.step_count, method.grad_scale)
        one.add_gradient(piece.first_row, w_SC, grad_SC)
        updates.append(one)
    _add_up(ranks, [sums for one in updates for sums in one.first_sums])
    for piece, one, grad_SC in zip(pieces, updates, grads, strict=True):
        one.add_update(piece.first_row, grad_SC)
    _add_up(ranks, [one.update_squares for one in updates])
    for piece, one, w_SC, grad_SC in zip(pieces, updates, weights, grads, strict=True):
        tensor, (lr, decay) = piece.tensor, method._rates(piece.tensor)
        method.received.add(tensor.name)
        if method._adds_to_norm:
            method.squares.of(tensor).add_(one.grad_squares)
        how = method._rounding_of(tensor, w_SC) | {"changed": changed}
        how["offset"] = tensor.start + piece.first_row * tensor.shape[1]
        one.change(piece.first_row, w_SC, grad_SC, lr, decay, how)
        piece.w.view(-1)[piece.begin : piece.end] = piece.of_rows(w_SC)


def _add_up(ranks: Ranks, sums: list[torch.Tensor]) -> None:
    """Sums in place over the ranks, in one exchange."""
    total = ranks.sum(torch.cat([one.reshape(-1) for one in sums]))
    for one, found in zip(sums, total.split([one.numel() for one in sums]), strict=True):
        one.copy_(found.view(one.shape))
