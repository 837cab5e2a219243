"""Shared by methods whose parameters a torch optimizer updates: the rate, clipping and the update.

norm = |all gradients|        g <- g min(1, max_grad_norm / norm)        a non-finite norm: no update
"""

import torch

from keyhole.methods.base import Method


class ByTorch(Method):
    """`params`: by name, with gradients computed by autograd."""

    params: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    max_grad_norm: float | None
    _grad_norm: torch.Tensor | None = None

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def _update(self) -> None:
        """Updates from the gradients in .grad."""
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        self._grad_norm = torch.nn.utils.clip_grad_norm_(self.params.values(), limit)
        if torch.isfinite(self._grad_norm):
            self.optimizer.step()
