"""Adam on what LSP compressed, moments on the device.

For a piece with gradient g (float32), all of a unit's pieces in one launch:

    m <- b1 m + (1 - b1) c g      v <- b2 v + (1 - b2) (c g)^2
    delta = - m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

torch's fused AdamW does it, given a parameter that is 0 and a rate of 1: what it leaves in the parameter is delta. It
takes c (the clip factor) and "skip this step" (a gradient that is not finite) as numbers on the device, so that the
host never waits. t counts the updates of a piece, on the device as well, since only there is known which were skipped.

Bytes: 8 a number for the moments; gradient and delta are buffers that the units share, except with clipping by the
norm of the whole: then every unit's gradient waits for that norm (4 more).
"""

from typing import Any

import torch

from keyhole.methods.lsp_piece import Piece

Pieces = dict[int, list[Piece]]  # by unit


def place(pieces: Pieces) -> dict[int, int]:
    """Gives every piece its place in the buffers of its unit; the lengths of these. Starts are multiples of 64."""
    lengths = {}
    for unit, members in pieces.items():
        end = 0
        for piece in members:
            piece.begin, end = end, end + -(-piece.numel // 64) * 64
        lengths[unit] = end
    return lengths


def seen(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece's part of a buffer of its unit."""
    return flat[piece.begin : piece.begin + piece.numel].view(piece.shape)


class DeviceAdam:
    """See the top of this file. waits: gradients are kept until `deltas` is asked for them, unit by unit."""

    on = "device"

    def __init__(self, pieces: Pieces, device: torch.device, rule: dict[str, float], waits: bool) -> None:
        self.lengths, self.device, self.rule, self.waits = place(pieces), device, rule, waits
        self.m, self.v = ({u: self._zeros(n) for u, n in self.lengths.items()} for _ in range(2))
        self.index = {piece.name: k for k, piece in enumerate(p for members in pieces.values() for p in members)}
        self.steps_K = torch.zeros(len(self.index), device=device)
        largest = max(self.lengths.values())
        self.shared, self.delta = (torch.empty(largest, device=device) for _ in range(2))
        self.waiting: dict[int, torch.Tensor] = {}

    def _zeros(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, device=self.device)

    def buffer(self, unit: int) -> torch.Tensor:
        """Where the unit's gradient is gathered."""
        if not self.waits:
            return self.shared[: self.lengths[unit]]
        if unit not in self.waiting:
            self.waiting[unit] = torch.empty(self.lengths[unit], device=self.device)
        return self.waiting[unit]

    def deltas(self, unit: int, given: list[Piece], clip: torch.Tensor | None, skip: torch.Tensor) -> torch.Tensor:
        """The unit's steps from its gradients: a buffer, valid until the next call. skip: 1.0 changes nothing."""
        grad, delta = self.buffer(unit), self.delta[: self.lengths[unit]].zero_()
        views = [[seen(flat, piece) for piece in given] for flat in (delta, grad, self.m[unit], self.v[unit])]
        steps = [self.steps_K[self.index[piece.name]] for piece in given]
        torch._foreach_add_(steps, 1.0)
        how: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "amsgrad": False, "maximize": False, **self.rule}
        scale = None if clip is None else 1.0 / clip
        torch._fused_adamw_(*views, [], steps, **how, grad_scale=scale, found_inf=skip)
        torch._foreach_sub_(steps, [skip] * len(steps))
        self.waiting.pop(unit, None)
        return delta

    def moments(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """m and v of a piece, as views."""
        return seen(self.m[piece.unit], piece), seen(self.v[piece.unit], piece)

    def count(self, piece: Piece) -> int:
        """Updates so far. The host waits."""
        return int(self.steps_K[self.index[piece.name]])

    def set_count(self, piece: Piece, count: int) -> None:
        self.steps_K[self.index[piece.name]] = float(count)

    def close(self) -> None:
        """Nothing to end."""
