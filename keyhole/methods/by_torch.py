"""Shared by methods whose parameters a torch optimizer updates: the rate, clipping and the update.

norm = |all gradients|        g <- g min(1, max_grad_norm / norm)        a non-finite norm: no update
"""

import torch

from keyhole.methods.base import Method


class ByTorch(Method):
    """`params`: by name, with gradients computed by autograd."""

    params: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    _grad_norm: torch.Tensor | None = None

    def _clip_and_step(self) -> None:
        """Updates from the gradients in .grad."""
        limit = float("inf") if self.settings.max_grad_norm is None else self.settings.max_grad_norm
        self._grad_norm = torch.nn.utils.clip_grad_norm_(self.params.values(), limit)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        if torch.isfinite(self._grad_norm):
            self.optimizer.step()
