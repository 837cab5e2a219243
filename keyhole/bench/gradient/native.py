"""The baseline of first-order tables: torch's own optimizer on the plain Hugging Face module.

master=True is the usual mixed precision: the optimizer updates fp32 copies of 16-bit weights, whose gradients are
converted one tensor at a time. State in bytes per parameter, with weights of b bytes:

    SGD 0    SGD, master 4    AdamW 2 b    AdamW, master 12
"""

from collections.abc import Sequence
from typing import Any

import torch

import keyhole
from keyhole.bench.gradient.trials import NATIVE
from keyhole.methods.base import Method
from keyhole.model.batch import Batch, as_list


class Native(Method):
    """The usual PyTorch loop, with Hugging Face's gradient checkpointing."""

    name = NATIVE

    def __init__(
        self,
        model: keyhole.Model,
        lr: float,
        optimizer: str,
        checkpointing: bool = True,
        master: bool = False,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        self.model, self.lr, self.max_grad_norm = model, lr, max_grad_norm
        self.module, self.device = model.module, model.device
        self.module.train()
        if checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        self.own = list(self.module.parameters())
        self.masters = [p.detach().to(torch.float32, copy=True).requires_grad_() for p in self.own] if master else []
        self.optimizer = getattr(torch.optim, optimizer)(self.masters or self.own, lr=lr, **options)

    def step(self, batch: Batch | Sequence[Batch]) -> torch.Tensor:
        """One step on a batch, or on micro-batches of the same number of tokens."""
        batches, losses = as_list(batch), []
        for micro in batches:
            loss = self.module(**{k: v.to(self.device) for k, v in micro.items()}, use_cache=False).loss / len(batches)
            loss.backward()
            losses.append(loss.detach())
        loss = torch.stack(losses).sum()
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.own, self.max_grad_norm)
        if self.masters:
            self._update_masters()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss

    @torch.no_grad()
    def _update_masters(self) -> None:
        """Updates one tensor after the other: the optimizer only updates tensors with a gradient."""
        for param, master in zip(self.own, self.masters, strict=True):
            master.grad, param.grad = param.grad.float(), None
            self.optimizer.step()
            master.grad = None
            param.copy_(master)

    def state(self) -> list[torch.Tensor]:
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.masters, *(value for value in kept if isinstance(value, torch.Tensor))]
