"""The baselines, on the plain Hugging Face module: MeZO's published loop, and torch's own optimizers.

Textbook. All parameters are on the device; one step is

    w += eps z(seed);  L+ = loss;  w -= 2 eps z(seed);  L- = loss;  w += eps z(seed)
    g = (L+ - L-) / (2 eps);       w -= lr g z(seed)

z is drawn tensor by tensor in the parameter's dtype, and drawn again from its seed each of the four times; the sums
follow MeZO's published code (github.com/princeton-nlp/MeZO, trainer.py), temporaries included. The loss is the model's
own (`labels=...`). One change favours the baseline: the losses are read after the third pass over w was queued, so that
the device does not idle while the host waits for them. `in_place=True` adds z with one in-place kernel instead: a tuned
loop that was not published, for comparison.

Native. The usual loop, with Hugging Face's gradient checkpointing. master=True is the usual mixed precision: the
optimizer updates fp32 copies of 16-bit weights, whose gradients are converted one tensor at a time. State in bytes per
parameter, with weights of b bytes:

    SGD 0    SGD, master 4    AdamW 2 b    AdamW, master 12
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

import keyhole
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.model.batch import Batch, as_list


class Textbook:
    """`step(batch)` like a method of keyhole, on an ordinary HF module."""

    def __init__(
        self, module: nn.Module, lr: float, *, eps: float = 1e-3, seed: int = 0, in_place: bool = False
    ) -> None:
        self.module, self.lr, self.eps, self.in_place = module, lr, eps, in_place
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.device = self.params[0].device
        self.generator = torch.Generator(self.device)
        self.seeds = torch.Generator().manual_seed(seed)
        self.projected = 0.0

    @torch.no_grad()
    def step(self, batch: Batch | Sequence[Batch]) -> torch.Tensor:
        """One step; returns the mean of the two losses, without synchronising."""
        (one,) = as_list(batch)
        inputs = {name: x.to(self.device) for name, x in one.items()}
        seed = int(torch.randint(2**31, (), generator=self.seeds))
        self.perturb(seed, 1)
        plus = self.module(**inputs, use_cache=False).loss
        self.perturb(seed, -2)
        minus = self.module(**inputs, use_cache=False).loss
        self.perturb(seed, 1)
        self.projected = float((plus - minus) / (2 * self.eps))
        self.update(seed)
        loss: torch.Tensor = (plus + minus) / 2
        return loss

    def perturb(self, seed: int, sign: int) -> None:
        """w += sign eps z(seed)."""
        for param, z in self._drawn(seed):
            if self.in_place:
                param.data.add_(z, alpha=sign * self.eps)
            else:
                param.data = param.data + sign * z * self.eps

    def update(self, seed: int) -> None:
        """w -= lr g z(seed)."""
        for param, z in self._drawn(seed):
            if self.in_place:
                param.data.add_(z, alpha=-self.lr * self.projected)
            else:
                param.data = param.data - self.lr * (self.projected * z)

    def _drawn(self, seed: int) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        self.generator.manual_seed(seed)
        for p in self.params:
            z = torch.empty(p.shape, dtype=p.dtype, device=p.device).normal_(0.0, 1.0, generator=self.generator)
            yield p, z


def take_weights(model: keyhole.Model) -> nn.Module:
    """The module of a resident model, its parameters in memory of their own: keyhole's is freed, which would otherwise
    be charged to the baseline. By way of the host where both do not fit. Afterwards only the module can be used."""
    model.apply_deferred()
    model.engine.wait_for_homes()
    size, is_on_gpu = sum(home.nbytes for home in model.engine.homes), model.device.type == ACCELERATOR
    place = model.device if is_on_gpu and accelerator.mem_get_info(model.device)[0] > 1.1 * size else "cpu"
    kept = [(t.param, t.param.data.to(place, copy=True)) for t in model.layout.tensors]
    for param, _ in kept:
        param.data = param.data.new_empty(0)
    for home in model.engine.homes:
        home.untyped_storage().resize_(0)
    for param, value in kept:
        param.data = value.to(model.device)
    module: nn.Module = model.module
    return module


class Native:
    """torch.optim.<optimizer> with these options."""

    def __init__(
        self,
        model: keyhole.Model,
        lr: float,
        optimizer: str,
        checkpointing: bool = True,
        master: bool = False,
        max_grad_norm: float | None = None,
        **options: bool | float,
    ) -> None:
        self.max_grad_norm, self.module, self.device = max_grad_norm, model.module.train(), model.device
        if checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        self.own = list(self.module.parameters())
        self.masters = [p.detach().to(torch.float32, copy=True).requires_grad_() for p in self.own] if master else []
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, optimizer)(
            self.masters or self.own, lr=lr, **options
        )

    def step(self, batch: Batch | Sequence[Batch]) -> torch.Tensor:
        """One step on a batch, or on micro-batches of the same number of tokens."""
        batches, losses = as_list(batch), []
        for micro in batches:
            loss = self.module(**{k: v.to(self.device) for k, v in micro.items()}, use_cache=False).loss / len(batches)
            loss.backward()
            losses.append(loss.detach())
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.own, self.max_grad_norm)
        if self.masters:
            self._update_masters()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    @torch.no_grad()
    def _update_masters(self) -> None:
        """Updates one tensor after the other: the optimizer only updates tensors with a gradient."""
        for param, master in zip(self.own, self.masters, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
            self.optimizer.step()
            master.grad = None
            param.copy_(master)

    def state(self) -> list[torch.Tensor]:
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.masters, *(value for value in kept if isinstance(value, torch.Tensor))]
