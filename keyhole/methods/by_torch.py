"""Shared by methods whose parameters a torch optimizer updates: groups, the rate, clipping, the update, its state.

norm = |all gradients|        g <- g min(1, max_grad_norm / norm)        a non-finite norm: no update
"""

from collections.abc import Mapping

import torch
from torch import nn

from keyhole.methods.base import Method, Saved, State
from keyhole.methods.weight_decay import WeightDecay


class ByTorch(Method):
    """`params`: by name, with gradients computed by autograd."""

    params: dict[str, nn.Parameter]
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

    def metrics(self) -> dict[str, torch.Tensor | float]:
        """grad_norm: of all gradients, unclipped."""
        return {} if self._grad_norm is None else {"grad_norm": self._grad_norm}


def parameter_groups(params: list[nn.Parameter], decay: WeightDecay) -> list[dict]:
    """Groups for a torch optimizer: with and without decay; one group if all parameters are alike."""
    rates = sorted({decay.of(p) for p in params}, reverse=True)
    return [{"params": [p for p in params if decay.of(p) == rate], "weight_decay": rate} for rate in rates]


def optimizer_state(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> State:
    """By the names of parameters: name/key."""
    return {
        f"{name}/{key}": value
        for name, param in params.items()
        for key, value in optimizer.state.get(param, {}).items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], state: Saved) -> None:
    """Loads copies, because the caller's may be a live state."""
    optimizer.state.clear()
    for full_name in state:
        name, _, key = full_name.rpartition("/")
        if name in params and key != "adapter":
            value, param = state[full_name], params[name]
            if isinstance(value, torch.Tensor):
                value = value.to(value.device if key == "step" else param.device, copy=True)
            optimizer.state[param][key] = value
