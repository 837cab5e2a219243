"""The baselines, on the plain Hugging Face module: MeZO's loop, and the usual loops of torch, as published and tuned.

Textbook. All parameters are on the device; one step is

    w += eps z(seed);  L+ = loss;  w -= 2 eps z(seed);  L- = loss;  w += eps z(seed)
    g = (L+ - L-) / (2 eps);       w -= lr g z(seed)

z is drawn tensor by tensor in the parameter's dtype, and drawn again from its seed each of the four times; the sums
follow MeZO's published code (github.com/princeton-nlp/MeZO, trainer.py), temporaries included. The loss is the model's
own (`labels=...`). One change favours the baseline: the losses are read after the third pass over w was queued, so that
the device does not idle while the host waits for them. `in_place=True` adds z with one in-place kernel instead: a
better loop, which was not published.

Native. The usual loop, with Hugging Face's gradient checkpointing (not reentrant). hook=True: each weight is updated in
a hook as soon as its gradient is complete, and the gradient is dropped, so that no two blocks of gradients exist: SGD,
or AdaLomo's rule (ops/adalomo.py) in plain PyTorch. peft=r: its adapters of rank r (LoRA) beside every linear layer of
the blocks are trained, by default in float32. master=True is the usual mixed precision: the optimizer updates fp32
copies of 16-bit weights, whose gradients are converted one tensor at a time. State in bytes per
parameter, with weights of b bytes:

    SGD 0    SGD, master 4    AdamW 2 b    AdamW, master 12

compile=True compiles every block, the tuned form of each of them (a text: another backend of torch.compile).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import keyhole
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.methods.lora.adapters import lora_config
from keyhole.model.batch import Batch, as_list
from keyhole.model.structure.find import find_blocks


class Textbook:
    """`step(batch)` like a method of keyhole, on an ordinary HF module."""

    def __init__(
        self,
        module: nn.Module,
        lr: float,
        *,
        eps: float = 1e-3,
        seed: int = 0,
        in_place: bool = False,
        compile: bool | str = False,
    ) -> None:
        self.module, self.lr, self.eps, self.in_place = module, lr, eps, in_place
        compile_blocks(module, compile)
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
        return torch.stack([plus, minus]).mean()

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
    """The module of a resident model as Hugging Face made it, its parameters in memory of their own: keyhole's is
    freed, which would otherwise be charged to the baseline. By way of the host where both do not fit. Afterwards only
    the module can be used."""
    model.apply_deferred()
    model.engine.wait_for_homes()
    model.patches.close()  # hooks would break the graphs of compiled blocks
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


def compile_blocks(module: nn.Module, how: bool | str) -> None:
    """how: False, True, or the name of a backend."""
    torch.compiler.reset()  # graphs of earlier modules count against the most that torch makes
    for block in find_blocks(module) if how else ():
        block.compile(backend="inductor" if how is True else how)


def adalomo_(w: torch.Tensor, state: list[torch.Tensor], grad: torch.Tensor, beta: torch.Tensor, lr: float) -> None:
    """state: the moment's mean over each side of a matrix, or all of a vector's. beta: of this step."""
    g, size = grad.float(), w.numel() ** 0.5
    squares = g.square() + 1e-30
    if w.dim() == 1:
        u = g * state[0].lerp_(squares, 1 - beta).rsqrt()
    else:
        row, col = (side.lerp_(squares.mean(1 - i), 1 - beta) for i, side in enumerate(state))
        u = g * (row / row.mean()).rsqrt()[:, None] * col.rsqrt()
    step = lr * (w.float().norm() / size).clamp(min=1e-3) / (u.norm() / size).clamp(min=1)
    w.copy_(w.float() - step * u)


@torch.no_grad()
def update_at_once(
    rule: Callable[..., None] | None, state: list[torch.Tensor], beta: torch.Tensor, lr: float, param: nn.Parameter
) -> None:
    """A hook: updates the weight, and drops its gradient. rule: None is SGD's."""
    if rule is None:
        param.add_(param.grad, alpha=-lr)  # type: ignore[arg-type]  # a hook is called with a gradient
    else:
        rule(param, state, param.grad, beta, lr)
    param.grad = None


class Native:
    """torch.optim.<optimizer> with these options; in hooks SGD, or AdaLOMO."""

    def __init__(
        self,
        module: Any,
        lr: float,
        optimizer: str,
        *,
        checkpointing: bool = True,
        master: bool = False,
        max_grad_norm: float | None = None,
        hook: bool = False,
        peft: int = 0,
        compile: bool | str = False,
        **options: bool | float,
    ) -> None:
        self.max_grad_norm, self.module, self.hook, self.count = max_grad_norm, module.train(), hook, 0
        if checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        if peft:
            from peft import get_peft_model

            self.module = get_peft_model(module, lora_config()(r=peft, lora_alpha=16, target_modules="all-linear"))
        compile_blocks(self.module, compile)
        self.own = [param for param in self.module.parameters() if param.requires_grad]
        self.device = self.own[0].device
        self.masters = [p.detach().to(torch.float32, copy=True).requires_grad_() for p in self.own] if master else []
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, "SGD" if hook else optimizer)(
            self.masters or self.own, lr=lr, **options
        )  # with hooks, it finds no gradients
        self.beta = torch.zeros((), device=self.device)
        rule: Callable[..., None] | None = None if optimizer == "SGD" else adalomo_
        if rule is not None and compile:
            rule = torch.compile(rule, backend="inductor" if compile is True else compile)
        for param in self.own if hook else ():
            param.register_post_accumulate_grad_hook(
                partial(update_at_once, rule, [torch.zeros(n, device=self.device) for n in param.shape], self.beta, lr)
            )

    def step(self, batch: Batch | Sequence[Batch]) -> torch.Tensor:
        """One step on a batch, or on micro-batches of the same number of tokens."""
        batches, losses, self.count = as_list(batch), [], self.count + 1
        assert len(batches) == 1 or not self.hook, "a hook would update after each micro-batch"
        self.beta.fill_(1 - self.count**-0.8)
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
