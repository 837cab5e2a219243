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

Receiver = Callable[[nn.Parameter, torch.Tensor, torch.Tensor, bool], bool]
"""(weight, dy_MO, x_MI, used_once) -> whether it accepts. used_once: no other call in the block uses the weight."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, call: "_Call") -> Any:
        ctx.save_for_backward(x)
        ctx.weight, ctx.call = weight, call
        if call.leave_out:
            return x.new_empty((*x.shape[:-1], weight.shape[0]))
        return F.linear(x, weight, bias).data  # no view, so that the model may write into it (Longformer)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight.data
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        dx = dy @ weight if wants_x else None
        dy_MO = dy.reshape(-1, dy.shape[-1])
        db = dy_MO.sum(dim=0) if wants_bias else None
        dw = None
        if wants_weight:
            x_MI = x.reshape(-1, x.shape[-1])
            if not ctx.call.offer(ctx.weight, dy_MO, x_MI):
                dw = dy_MO.t() @ x_MI
        return dx, dw, db, None


class _Call:
    """One call of a layer: the receiver of its gradient, and whether its product is skipped."""

    def __init__(self, receiver: Receiver, leave_out: bool, counts: "Counts") -> None:
        self.receiver, self.leave_out, self.counts = receiver, leave_out, counts

    def offer(self, weight: nn.Parameter, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """A weight that is used twice has two such products, neither of which is its complete gradient."""
        return self.receiver(weight, dy_MO, x_MI, self.counts.uses[id(weight)] == 1)


class Counted(Protocol):
    """The object that runs layers of experts: it has the counts, and the index of the call that is skipped."""

    counts: "Counts | None"
    leave_out: int | None


class Recompute:
    """Recomputes one block, whose linear layers offer their gradients."""

    def __init__(self, block: nn.Module) -> None:
        self.layers = [m for m in block.modules() if type(m) is nn.Linear]
        self.last_product: dict[bool, int | None] = {}  # the call that can be skipped, by block.training
        self.block = block

    def run(self, call: Callable[[], Any], receiver: Receiver, experts: "Counted | None" = None) -> Any:
        """call(), with every linear layer offering its gradient to the receiver. experts: runs layers of experts, if
        there are any."""
        mode = self.block.training
        leave_out, counts = self.last_product.get(mode), Counts()
        hooks = torch.autograd.graph.saved_tensors_hooks(counts.save, _same)
        with self._offering(receiver, leave_out, counts, experts), hooks:
            output = call()
        nothing_saved_after = counts.calls and counts.saved == counts.saved_before_last + counts.saved_by_last
        last = counts.calls - 1 if nothing_saved_after else None
        self.last_product[mode] = last
        if leave_out is not None and leave_out != last:
            with self._offering(receiver, None, Counts(), experts):
                return call()
        return output

    def run_whole(self, call: Callable[[], Any], receiver: Receiver) -> Any:
        """Like `run`, with no product skipped, for a graph whose output is used."""
        with self._offering(receiver, None, Counts(), None):
            return call()

    @contextmanager
    def _offering(
        self, receiver: Receiver, leave_out: int | None, counts: "Counts", experts: "Counted | None"
    ) -> Iterator[None]:
        if experts is not None:
            experts.counts, experts.leave_out = counts, leave_out
        before = [layer.__dict__.get("forward") for layer in self.layers]
        layer: Any  # its forward is replaced
        for layer in self.layers:
            layer.forward = self.wrapped(layer, receiver, leave_out, counts)
        try:
            yield
        finally:
            if experts is not None:
                experts.counts = experts.leave_out = None
            for layer, forward in zip(self.layers, before, strict=True):
                if forward is None:
                    del layer.forward
                else:
                    layer.forward = forward

    def wrapped(self, layer: Any, receiver: Receiver, leave_out: int | None, counts: "Counts") -> Callable:
        """The forward of a layer during such a run."""
        return _forward(layer, receiver, leave_out, counts)


class Counts:
    """Calls of linear layers and layers of experts, and tensors saved for backward."""

    def __init__(self) -> None:
        self.calls = self.saved = self.saved_before_last = self.saved_by_last = 0
        self.uses: Counter[int] = Counter()  # number of calls per weight

    def called(self, saves: int) -> int:
        """Counts another product, which will save `saves` tensors; returns the number of products before it."""
        self.calls, self.saved_before_last, self.saved_by_last = self.calls + 1, self.saved, saves
        return self.calls - 1

    def save(self, x: torch.Tensor) -> torch.Tensor:
        self.saved += 1
        return x


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _forward(layer: nn.Linear, receiver: Receiver, leave_out: int | None, counts: Counts) -> Callable:
    def forward(x: torch.Tensor) -> torch.Tensor:
        index = counts.called(saves=1)
        counts.uses[id(layer.weight)] += 1
        return _Linear.apply(x, layer.weight, layer.bias, _Call(receiver, index == leave_out, counts))

    return forward
