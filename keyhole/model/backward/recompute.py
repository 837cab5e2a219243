"""The recomputation of a block, with linear layers whose weight gradient is used as soon as it is computed.

    y = x W^T + b        dx = dy W        dW = dy^T x

Autograd returns dW as a tensor of W's size, and keeps it until the whole block is done. Here the backward of a linear
layer first computes dx, then offers the factors (dy, x) to a receiver, which may add dy^T x directly to W, or compute
dW in a buffer that the next layer reuses. If the receiver declines, dW is returned to autograd as usual.

The last product of a recomputation is often unnecessary: the backward pass needs only tensors that later operations
*save*, and after the last product of most blocks nothing is saved (only a residual is added). `Recompute` learns in the
first backward pass which call of a linear layer that is, and skips this product from then on: a fifth of the
recomputation of a Llama block. It counts the saved tensors in every run; if something is saved after that call, the
block is run once more with nothing skipped. A layer of experts (experts.py) counts as one product: if it is the last,
its experts need not be loaded for the recomputation.
Legend: M tokens, O outputs, I inputs.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from keyhole.model.forward.hooks import replaced_forwards

# (weight, dy_MO, x_MI, used_once) -> whether it accepts. used_once: no other call in the block uses the weight.
Receiver = Callable[[nn.Parameter, torch.Tensor, torch.Tensor, bool], bool]


class Run:
    """One run of a block: who receives gradients, the call whose product is skipped (by its index), and counts of calls
    of linear layers and layers of experts, and of tensors saved for backward."""

    def __init__(self, receiver: Receiver, skipped: int | None = None) -> None:
        self.receiver, self.skipped = receiver, skipped
        self.calls = self.saved = self.saved_before_last = self.saved_by_last = 0
        self.uses: Counter[int] = Counter()  # number of calls per weight

    def called(self, saves: int) -> bool:
        """Counts another product, which will save `saves` tensors; whether it is skipped."""
        self.calls, self.saved_before_last, self.saved_by_last = self.calls + 1, self.saved, saves
        return self.calls - 1 == self.skipped

    def save(self, x: torch.Tensor) -> torch.Tensor:
        self.saved += 1
        return x

    @property
    def last_product(self) -> int | None:
        """The last call, if nothing was saved after it."""
        nothing_after = self.calls and self.saved == self.saved_before_last + self.saved_by_last
        return self.calls - 1 if nothing_after else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, run: Run) -> torch.Tensor:
        skipped = run.called(saves=1)
        run.uses[id(weight)] += 1
        ctx.save_for_backward(x)
        ctx.weight, ctx.run = weight, run
        if skipped:
            return x.new_empty((*x.shape[:-1], weight.shape[0]))
        return F.linear(x, weight, bias).data  # no view, so that the model may write into it (Longformer)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight, run = ctx.saved_tensors, ctx.weight, ctx.run
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        dx = dy @ weight.data if wants_x else None
        dy_MO = dy.reshape(-1, dy.shape[-1])
        db = dy_MO.sum(dim=0) if wants_bias else None
        dw = None
        if wants_weight:
            x_MI = x.reshape(-1, x.shape[-1])
            if not run.receiver(weight, dy_MO, x_MI, run.uses[id(weight)] == 1):
                dw = dy_MO.t() @ x_MI
        return dx, dw, db, None


class RunsExperts(Protocol):
    """What runs layers of experts."""

    recomputation: Run | None


class Recompute:
    """Recomputes one block, whose linear layers offer their gradients."""

    def __init__(self, block: nn.Module) -> None:
        self.layers: list[Any] = [m for m in block.modules() if type(m) is nn.Linear]
        self.last_product: dict[bool, int | None] = {}  # the call that can be skipped, by block.training
        self.block = block

    def run(self, call: Callable[[], Any], receiver: Receiver, experts: RunsExperts | None = None) -> Any:
        """call(), with every linear layer offering its gradient to the receiver. experts: runs layers of experts, if
        there are any."""
        mode = self.block.training
        run = Run(receiver, self.last_product.get(mode))
        with self._offering(run, experts), torch.autograd.graph.saved_tensors_hooks(run.save, lambda x: x):
            output = call()
        self.last_product[mode] = run.last_product
        if run.skipped is not None and run.skipped != run.last_product:
            return self.run_whole(call, receiver, experts)
        return output

    def run_whole(self, call: Callable[[], Any], receiver: Receiver, experts: RunsExperts | None = None) -> Any:
        """Like `run`, with no product skipped, for a graph whose output is used."""
        with self._offering(Run(receiver), experts):
            return call()

    @contextmanager
    def _offering(self, run: Run, experts: RunsExperts | None) -> Iterator[None]:
        if experts is not None:
            experts.recomputation = run
        try:
            with replaced_forwards(self.layers, [self.wrapped(layer, run) for layer in self.layers]):
                yield
        finally:
            if experts is not None:
                experts.recomputation = None

    def wrapped(self, layer: Any, run: Run) -> Callable:
        """The forward of a layer during such a run."""
        return lambda x: _Linear.apply(x, layer.weight, layer.bias, run)
