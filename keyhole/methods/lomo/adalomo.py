"""AdaLOMO: LOMO with a step size for every weight, from a second moment kept as one number per row and one per column.

For a matrix [R, C] with gradient g (ops/adalomo.py has the equations in full):

    row, col <- running means of g^2 over columns, over rows         R + C numbers in fp32 instead of R C
    u = g / sqrt(row x col / mean(row))                              then divided by max(1, rms(u))
    w <- round(w - lr max(1e-3, rms(w)) (u + weight_decay w))

The two norms, of the update and of the weight, are per matrix ("grouped"), so they need no second backward pass.
Vectors keep a full second moment. An expert of a large stack is a matrix of its own, and so is a chunk of a large table
(embedding or head, 8,192 rows), wherever it lies: its gradient exists only while it is visited, so sums over the whole
table would need it two times more. Everything else is LOMO's.

On several ranks each has some elements of a sharded matrix, and ranks exchange sums, not gradients: R + C + 3 numbers
per matrix in float32, summed by all in the same order, so that the moments, which every rank keeps whole, have the same
bits everywhere. A rank's elements may begin and end within a row; its rows are padded with zeros, which add nothing to
any sum and are not updated.
"""

from collections.abc import Mapping
from typing import Any

import torch

from keyhole import ops
from keyhole.methods.base import State
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.lomo.traits import ADALOMO
from keyhole.methods.lomo.update import Tally, Update, by_tensor
from keyhole.methods.shards import Piece
from keyhole.model.structure.layout import FlatTensor
from keyhole.ops.adalomo import moment_decay
from keyhole.ops.rounding.round import FLOAT32_MAX
from keyhole.ranks import Ranks

Moments = dict[str, torch.Tensor]
EPS1, EPS2 = 1e-30, 1e-3  # as in ops/adalomo


class AdaLOMOUpdate(Update):
    """The rule with its moments, by the names of tensors."""

    whole_tensors = shares_matrices = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.moments: dict[str, Moments] = {}
        self.stacks = {id(t.param): t for t in self.model.layout.tensors if t.experts}

    def moments_of(self, tensor: FlatTensor) -> Moments:
        """For an expert: its slice of the stack's moments."""
        whole = self.stacks.get(id(tensor.param), tensor)
        if whole.name not in self.moments:
            self.moments[whole.name] = ops.adalomo_state(whole.shape, self.model.device)
        state = self.moments[whole.name]
        if whole.shape == tensor.shape:
            return state
        expert = (tensor.start - whole.start) // tensor.shape.numel()
        return {key: value[expert] for key, value in state.items()}

    def rule(
        self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, lr: float, decay: float, how: dict[str, Any]
    ) -> None:
        rate: Any = lr
        beta = None
        if self.numbers is not None and self.update_key is not None:
            rate, beta, how["step"] = self.numbers.lr, self.numbers.beta, self.numbers.step
        state = self.moments_of(tensor)
        when: dict[str, Any] = {"lr": rate, "beta": beta, "t": self.now.step}
        ops.adalomo_update_(w, grad, state, weight_decay=decay, scale=self.scale, **when, **how)

    def apply_parts(self, pieces: list[Piece], ranks: Ranks, tally: Tally) -> None:
        """Two exchanges: before and after the moments."""
        weights = [piece.as_rows(piece.w.view(-1)[piece.begin : piece.end]) for piece in pieces]
        grads = [piece.as_rows(piece.grad).float().mul_(self.scale) for piece in pieces]
        sums = []
        for piece, w_SC, grad_SC in zip(pieces, weights, grads, strict=True):
            rows_R = grad_SC.new_zeros(piece.tensor.shape[0])
            square_SC = grad_SC.square()
            rows_R[piece.first_row : piece.first_row + len(square_SC)] = square_SC.sum(1)
            sums.append([rows_R, square_SC.sum(0), square_SC.sum(), w_SC.float().square().sum()])
        _add_up(ranks, [each for one in sums for each in one])
        updates = []
        for piece, grad_SC, (rows_R, columns_C, squares, _) in zip(pieces, grads, sums, strict=True):
            state, beta, fine = self.moments_of(piece.tensor), moment_decay(self.now.step), squares <= FLOAT32_MAX
            for moment, found, length in (
                (state["row"], rows_R, len(columns_C)),
                (state["col"], columns_C, len(rows_R)),
            ):
                moment.copy_(torch.where(fine, moment * beta + (found / length + EPS1) * (1 - beta), moment))
            factor_S = (state["row"] / state["row"].mean()).rsqrt()[piece.first_row : piece.first_row + len(grad_SC)]
            updates.append(grad_SC.mul_(factor_S.unsqueeze(1)).mul_(state["col"].rsqrt()))
        moved = [update_SC.square().sum() for update_SC in updates]
        _add_up(ranks, moved)
        for piece, w_SC, update_SC, (_, _, squares, of_weights), total in zip(
            pieces, weights, updates, sums, moved, strict=True
        ):
            tensor, (lr, decay), fine = piece.tensor, self.rates(piece.tensor), squares <= FLOAT32_MAX
            self.now.received.add(tensor.name)
            if self.now.measures:
                self.tally.squares_of(tensor).add_(squares)
            self.tally.bad |= ~fine
            numel = tensor.shape.numel()
            step = lr * (of_weights / numel).sqrt().clamp(min=EPS2)
            update_SC.div_((total / numel).sqrt().clamp(min=1.0)).add_(w_SC, alpha=decay)
            how = self.rounding_of(tensor, w_SC, tally) | {"sum_squares": None, "bad": None}
            how["offset"] = tensor.start + piece.first_row * tensor.shape[1]
            ops.sgd_update_(w_SC, torch.where(fine, update_SC, 0.0), lr=1.0, scale=step, **how)
            piece.w.view(-1)[piece.begin : piece.end] = piece.of_rows(w_SC)

    def state(self) -> State:
        return super().state() | {f"{name}/{key}": v for name, each in self.moments.items() for key, v in each.items()}

    def load(self, state: Mapping[str, Any], step: int) -> None:
        super().load(state, step)
        self.moments = {}
        for key, found in by_tensor(state, {"row", "col", "v"}, self.model.device).items():
            for name, value in found.items():
                self.moments.setdefault(name, {})[key] = value


def _add_up(ranks: Ranks, sums: list[torch.Tensor]) -> None:
    """Sums in place over the ranks, in one exchange."""
    if sums:
        total = ranks.sum(torch.cat([one.reshape(-1) for one in sums]))
        for one, found in zip(sums, total.split([one.numel() for one in sums]), strict=True):
            one.copy_(found.view(one.shape))


class AdaLOMO(LOMO):
    """LOMO with a factored second moment. Its rate is relative to the size of the weights: 1e-4 to 1e-3, not SGD's."""

    row = ADALOMO
    rule = AdaLOMOUpdate

    @property
    def _beta(self) -> float:
        return moment_decay(self.step_count)
