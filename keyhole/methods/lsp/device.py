"""Adam on what LSP compressed, moments on the device: the units that update.py keeps there.

All pieces of a unit in one launch, each step in the place of its gradient (adam.py). The clip factor and "skip this
step" (a gradient that is not finite) are numbers on the device, so the host never waits. t counts the updates of a
piece, on the device as well, since only there is known which were skipped.

Bytes: 8 a number for the moments. With clipping by the norm of the whole, every unit's gradient has to wait for that
norm in a buffer of its own: 4 more.
"""

import torch

from keyhole.methods.lsp.adam import adam_delta_
from keyhole.methods.lsp.gather import Pieces, seen
from keyhole.methods.lsp.piece import Piece


class DeviceAdam:
    """See the top of this file. lengths: of the buffers of these units; waits: gradients wait for the norm."""

    def __init__(self, pieces: Pieces, lengths: dict[int, int], device: torch.device, rule: dict[str, float],
                 waits: bool) -> None:  # fmt: skip
        self.lengths, self.rule = {unit: lengths[unit] for unit in pieces}, rule
        self.m, self.v = ({u: torch.zeros(n, device=device) for u, n in self.lengths.items()} for _ in range(2))
        kept = self.lengths if waits else {}
        self.waiting = {u: torch.empty(n, device=device) for u, n in kept.items()}
        self.index = {piece.name: k for k, piece in enumerate(p for members in pieces.values() for p in members)}
        self.steps_K = torch.zeros(len(self.index), device=device)

    def deltas_(self, unit: int, given: list[Piece], grad: torch.Tensor, clip: torch.Tensor | None,
                skip: torch.Tensor) -> None:  # fmt: skip
        """The unit's gradients become its steps. skip: 1.0 changes nothing; a step of nan leaves its weight alone."""
        grads, m, v = ([seen(flat, piece) for piece in given] for flat in (grad, self.m[unit], self.v[unit]))
        steps = [self.steps_K[self.index[piece.name]] for piece in given]
        torch._foreach_add_(steps, 1.0)
        adam_delta_(grads, m, v, steps, self.rule, clip=clip, skip=skip)
        torch._foreach_sub_(steps, [skip] * len(steps))
        grad.masked_fill_(skip.bool(), float("nan"))

    def moments(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """m and v of a piece, as views."""
        return seen(self.m[piece.unit], piece), seen(self.v[piece.unit], piece)

    def count(self, piece: Piece) -> int:
        """Updates so far. The host waits."""
        return int(self.steps_K[self.index[piece.name]])

    def set_count(self, piece: Piece, count: int) -> None:
        self.steps_K[self.index[piece.name]] = float(count)
