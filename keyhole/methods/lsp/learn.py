"""When LSP learns projectors, and on what.

A reverse sweep of its own over the step's batch, which changes no weight: dY and X of a linear layer come by, and the
gradient they are the factors of is looked at before the next matrix is. No two gradients exist at a time.

    first step       every matrix: projectors are fitted (fit.py)
    check_freq       a sample of the matrices, drawn anew each time: the bias is measured on the batch, and where it is
                     above alpha, new projectors are drawn and fitted; they are taken if their bias is lower, and Adam's
                     moments are carried over into their subspace

The tokens are cut into PARTS, each with a gradient of its own, so that what is fitted holds for more than one.
Costs one reverse of a step, and the fits: products of d columns for blocks, some 50 steps of dense ones for the others.
"""

import math
import random
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.lsp.fit import Gradient, bias, fit, norm_squared, transfer_moments
from keyhole.methods.lsp.memory import PARTS
from keyhole.methods.lsp.piece import Piece
from keyhole.model.structure.layout import FlatTensor, Unit


class Learner:
    """A sink that looks at gradients, fits projectors, and changes no weight."""

    accumulates = True

    def __init__(self, method: Any) -> None:
        self.method = method
        matrices = [piece.tensor.start for piece in method.pieces.values() if piece.p is not None]
        if method.step_count:
            count = math.ceil(method.check_share * len(matrices))
            matrices = random.Random(f"{method.seed} {method.step_count}").sample(matrices, count)
        self.wanted = set(matrices)

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """The first micro-batch that comes by is the sample."""
        if tensor.start in self.wanted:
            rows = max(1, dy_MO.shape[0] // PARTS)
            parts = zip(dy_MO.detach().split(rows), x_MI.detach().split(rows), strict=True)
            self._look(tensor, list(parts)[:PARTS])
        return True

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """A matrix that is used in another way."""
        if tensor.start in self.wanted:
            self._look(tensor, [grad.detach()])

    def finished(self, unit: Unit) -> bool:
        return False

    def _look(self, tensor: FlatTensor, grads: list[Gradient]) -> None:
        self.wanted.discard(tensor.start)
        piece = self.method.pieces[tensor.start]
        grads = [grad for grad in grads if 0 < float(norm_squared(grad)) < float("inf")]
        if grads:
            with torch.no_grad():
                self.method.biases[piece.name] = consider(self.method, piece, grads)


def consider(method: Any, piece: Piece, grads: list[Gradient]) -> float:
    """Fits the piece's first projectors, or replaces them where they are no longer good; returns the bias now."""
    if piece.generation == 0:
        piece.take(*fit(grads, piece.p, piece.q, steps=method.fit_steps, alpha=method.alpha))
        return mean_bias(grads, piece.p, piece.q)
    before = mean_bias(grads, piece.p, piece.q)
    if before <= method.alpha:
        return before
    fresh = piece.draw(method.d, method.r, method.seed, method.model.device)
    p, q = fit(grads, *fresh, steps=method.fit_steps, alpha=method.alpha)
    after = mean_bias(grads, p, q)
    if not after < before:
        return before
    old = method.optimizer.where(piece.unit).moments(piece)
    moved = (moment.to(method.model.device) for moment in old)
    for moment, new in zip(old, transfer_moments(*moved, piece.p, piece.q, p, q), strict=True):
        moment.copy_(new)
    piece.take(p, q)
    return after


def mean_bias(grads: list[Gradient], p: Any, q: Any) -> float:
    """Over the gradients. The host waits."""
    return float(torch.stack([bias(grad, p, q) for grad in grads]).mean())


def restore(method: Any, piece: Piece, state: dict[str, Any]) -> None:
    """Projectors from a checkpoint: positions as drawn then, numbers as fitted."""
    generation = int(state[f"{piece.name}/generation"])
    piece.generation = max(0, generation - 1)  # the draw is that of the generation before
    p, q = piece.draw(method.d, method.r, method.seed, method.model.device)
    piece.generation = generation
    for key, drawn in (("p", p), ("q", q)):
        values = state[f"{piece.name}/{key}"]
        if values.shape != drawn.values_Rr.shape:
            raise UserError(
                f"lsp: the checkpoint's projector of {piece.name} has another shape; keep lsp.d, r and kind"
            )
    device = method.model.device
    piece.p, piece.q = (drawn.with_values(state[f"{piece.name}/{k}"].to(device)) for k, drawn in (("p", p), ("q", q)))
    piece.rescale()
