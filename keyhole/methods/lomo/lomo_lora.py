"""LoRA + LOMO: the model itself by LOMO, low-rank adapters beside its linear layers by AdamW, in one backward pass.

    y = W x + (alpha / r) B A x        W <- LOMO's rule, inside the reverse sweep;   A, B <- AdamW, after it

The adapters are small (r (I + O) numbers per layer) and stay on the device in fp32 with their moments, wherever the
model lives; an adaptive optimizer costs little memory there. Weight decay and all kinds of clipping apply to both; the
global norm is over both.

Both parts change, so they are saved separately: the model as an ordinary directory, and beside it the adapters in
peft's format, in adapter/. peft.PeftModel.from_pretrained(model, "<dir>/adapter") combines them.
"""

from collections.abc import Callable

import torch

from keyhole.methods.base import Saved, State
from keyhole.methods.by_torch import parameter_groups
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.lomo.traits import LOMO_LORA as ROW
from keyhole.methods.lomo.traits import LOMOLoRAConfig
from keyhole.methods.lora.adapters import Adapters, Base, adapt, whole_or_none
from keyhole.methods.shards import sum_gradients


class LOMOLoRA(LOMO):
    """LOMO on the model and AdamW on adapters. `lr` is LOMO's rate; the adapters' rate keeps its ratio to it."""

    row = ROW
    settings: LOMOLoRAConfig

    def _setup(self) -> None:
        model, own = self.model, self.settings
        with whole_or_none(model):
            self.beside = adapt(model, own.seed, r=own.r, alpha=own.alpha, target_modules=own.target_modules)
            self.adapters = self.beside.weights
            super()._setup()
            self.ratio = own.adapter_lr / self.lr if self.lr else None
            self.adapter_factor = 1.0
            groups = parameter_groups(list(self.adapters.values()), self.update.decay)
            self.optimizer = torch.optim.AdamW(groups, lr=own.adapter_lr)

    @classmethod
    def outline(cls, base: Base, own: LOMOLoRAConfig) -> None:
        adapt(base, 0, r=own.r, alpha=own.alpha, target_modules=own.target_modules)

    waits = True  # the adapters' torch optimizer must not see a step that is skipped

    # -- beside LOMO's backward passes -----------------------------------------------------------------------------

    def _drop_beside(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _add_up_beside(self) -> None:
        """Sums the adapters' gradients over ranks, in one collective; adapters are replicated on every rank. Their
        squares are a part of the global norm."""
        ranks = self.model.ranks
        if ranks.several:
            sum_gradients(ranks, list(self.adapters.values()))
        for param in self.adapters.values():
            if param.grad is not None:
                self.update.tally.extra.add_((param.grad * self.update.scale).square().sum())

    def follow(self, factor: Callable[[float], float]) -> None:
        if self.settings.adapter_warmup_ratio is not None:
            self.adapter_factor = factor(self.settings.adapter_warmup_ratio)

    @property
    def adapter_rate(self) -> float:
        """The adapters' rate in this step: it follows LOMO's, unless that was 0 at first, or they have a warm-up."""
        if self.settings.adapter_warmup_ratio is not None:
            return self.settings.adapter_lr * self.adapter_factor
        return self.settings.adapter_lr if self.ratio is None else self.lr * self.ratio

    @torch.no_grad()
    def _update_beside(self) -> None:
        """AdamW on the adapters, with the same clipping."""
        clip_value = self.update.clip_value
        for grad in (p.grad for p in self.adapters.values() if p.grad is not None):
            grad.mul_(self.update.scale)
            if clip_value is not None:
                grad.clamp_(-clip_value, clip_value)
        for group in self.optimizer.param_groups:
            group["lr"] = self.adapter_rate
        self.optimizer.step()
        self._drop_beside()

    # -- interface to the model (model/attached.py) ----------------------------------------------------------------

    @property
    def addon(self) -> Adapters:
        """The adapters; the model's own weights are saved as they are."""
        return self.beside

    def describe(self) -> list[str]:
        count = sum(p.numel() for p in self.adapters.values())
        return [
            *super().describe(),
            f"adapters: {len(self.beside.layers)} of rank {self.settings.r}, {count:,} parameters, by AdamW",
        ]

    # -- state -----------------------------------------------------------------------------------------------------

    def _state(self) -> State:
        return super()._state() | self.beside.state(self.optimizer)

    def _load(self, state: Saved) -> None:
        self.beside.load(self.optimizer, state, self.name)
        super()._load(state)
