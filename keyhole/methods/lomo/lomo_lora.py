"""LoRA + LOMO: the model itself by LOMO, low-rank adapters beside its linear layers by AdamW, in one backward pass.

    y = W x + (alpha / r) B A x        W <- LOMO's rule, inside the reverse sweep;   A, B <- AdamW, after it

The adapters are small (r (I + O) numbers per layer) and stay on the device in fp32 with their moments, wherever the
model lives; an adaptive optimizer costs little memory there. Weight decay and all kinds of clipping apply to both; the
global norm is over both.

Both parts change, so they are saved separately: the model as an ordinary directory, and beside it the adapters in
peft's format, in adapter/. peft.PeftModel.from_pretrained(model, "<dir>/adapter") combines them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.lomo.traits import LOMOLoRAConfig
from keyhole.methods.lora import peft_layers
from keyhole.methods.own_settings import checked_rate
from keyhole.methods.weight_decay import parameter_groups
from keyhole.methods.wrapped import State
from keyhole.model.model import Model


class LOMOLoRA(LOMO):
    """LOMO on the model and AdamW on adapters. `lr` is LOMO's rate; the adapters' rate keeps its ratio to it."""

    name = "lomo-lora"

    def __init__(
        self,
        model: Model,
        lr: float = 5e-3,
        *,
        adapter_lr: float = 2e-4,
        adapter_warmup_ratio: float | None = None,
        r: int = 8,
        alpha: float = 16.0,
        target_modules: list[str] | str | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if options.get("compile"):
            raise UserError("lomo-lora.compile: compiled blocks hand over every linear layer; set it to false")
        with peft_layers.whole_or_none(model):
            adapted = peft_layers.adapt(model, seed, r=r, alpha=alpha, target_modules=target_modules)
            self.config, self.layers, self.adapters = adapted.config, adapted.layers, adapted.params
            for param in self.adapters.values():
                param.data = param.data.to(model.device)
            self._addon = peft_layers.Adapters(self.adapters, self.config)
            super().__init__(model, lr, seed=seed, **options)
            self.adapter_lr, self.ratio = checked_rate(adapter_lr), adapter_lr / lr if lr else None
            self.adapter_warmup_ratio, self.adapter_factor = adapter_warmup_ratio, 1.0
            groups = parameter_groups(list(self.adapters.values()), self.weight_decay)
            self.optimizer = torch.optim.AdamW(groups, lr=adapter_lr)

    @classmethod
    def outline(cls, base: peft_layers.Base, own: LOMOLoRAConfig) -> None:
        peft_layers.adapt(base, 0, r=own.r, alpha=own.alpha, target_modules=own.target_modules, empty=True)

    waits = True  # the adapters' torch optimizer must not see a step that is skipped

    # -- beside LOMO's backward passes -----------------------------------------------------------------------------

    @torch.no_grad()
    def _add_up_extra_gradients(self) -> None:
        """Sums the adapters' gradients over ranks, in one collective; adapters are replicated on every rank."""
        ranks = self.model.ranks
        own = {name for name, param in self.adapters.items() if param.grad is not None}
        reached = set().union(*ranks.objects(own))
        params = [param for name, param in self.adapters.items() if name in reached]
        if params:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            total = ranks.sum(torch.cat([grad.flatten() for grad in grads]))
            for param, grad in zip(params, total.split([p.numel() for p in params]), strict=True):
                param.grad = grad.view(param.shape).to(param.dtype)

    @torch.no_grad()
    def _add_extra_squares(self) -> None:
        """The adapters' part of the global norm."""
        for param in self.adapters.values():
            if param.grad is not None:
                self.squares.extra.add_(self._squares_of(param.grad))

    def _squares_of(self, grad: torch.Tensor) -> torch.Tensor:
        return (grad if self.grad_scale is None else grad * self.grad_scale).square().sum()

    def _drop_extra_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def follow(self, factor: Callable[[float], float]) -> None:
        if self.adapter_warmup_ratio is not None:
            self.adapter_factor = factor(self.adapter_warmup_ratio)

    @property
    def adapter_rate(self) -> float:
        """The adapters' rate in this step: it follows LOMO's, unless that was 0 at first, or they have a warm-up."""
        if self.adapter_warmup_ratio is not None:
            return self.adapter_lr * self.adapter_factor
        return self.adapter_lr if self.ratio is None else self.lr * self.ratio

    @torch.no_grad()
    def _update_extra(self) -> None:
        """AdamW on the adapters, with the same clipping."""
        for grad in (p.grad for p in self.adapters.values() if p.grad is not None):
            if self.clip_group_norm is not None:
                grad.mul_(self._group_scale(self._squares_of(grad)))
            elif self.grad_scale is not None:
                grad.mul_(self.grad_scale)
            if self.clip_value is not None:
                grad.clamp_(-self.clip_value, self.clip_value)
        for group in self.optimizer.param_groups:
            group["lr"] = self.adapter_rate
        self.optimizer.step()
        self._drop_extra_gradients()

    # -- interface to the model (model/attached.py) ----------------------------------------------------------------

    @property
    def addon(self) -> peft_layers.Adapters:
        """The adapters; the model's own weights are saved as they are."""
        return self._addon

    def describe(self) -> list[str]:
        count = sum(p.numel() for p in self.adapters.values())
        return [
            *super().describe(),
            f"adapters: {len(self.layers)} of rank {self.config.r}, {count:,} parameters, by AdamW",
        ]

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        own = {f"{name}/adapter": p.data for name, p in self.adapters.items()}
        for name, param in self.adapters.items():
            own |= {f"{name}/adam_{key}": value for key, value in self.optimizer.state.get(param, {}).items()}
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        peft_layers.check_adapters(self.name, self.adapters, state)
        super().load_state_dict(state)
        self.optimizer.state.clear()
        for name, param in self.adapters.items():
            param.data.copy_(state[f"{name}/adapter"])
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if (value := state.get(f"{name}/adam_{key}")) is not None:
                    where = value.device if key == "step" else param.device
                    self.optimizer.state[param][key] = value.to(where, copy=True)  # the caller's may be a live state
