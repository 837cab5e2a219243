"""A linear layer whose weight gradient is consumed where it is made.

    y = x W^T + b        dx = dy W        dW = dy^T x

Autograd returns dW as a tensor of W's size, holds it until someone looks, and so on for every layer. Here the backward
of a linear layer first computes dx, and then offers (dy, x) to a taker, which may add dy^T x straight into W, or make
dW in a buffer that the next layer uses again. If the taker declines, dW goes the ordinary way.

In the second run of a block, the output of its last product is of no interest: only what later operations *save* for
backward is, and after the last product of most blocks nothing is saved (a residual is added, and that is all). `Again`
learns in the first reverse which call of a linear layer that is, and from then on leaves the product out: in a Llama
block a fifth of the work of the second run. It counts what is saved every time; if something is saved after all, the
block is run once more with nothing left out.
Legend: M tokens, O outputs, I inputs.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Taker = Callable[[nn.Parameter, torch.Tensor, torch.Tensor, bool], bool]
"""(weight, dy_MO, x_MI, alone) -> whether it was taken. alone: the block uses this weight once, so it is the whole."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, layer: "_Call") -> Any:
        ctx.save_for_backward(x)
        ctx.weight, ctx.layer = weight, layer
        if layer.leave_out:
            return x.new_empty((*x.shape[:-1], weight.shape[0]))
        return F.linear(x, weight, bias)

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
            if not ctx.layer.offer(ctx.weight, dy_MO, x_MI):
                dw = dy_MO.t() @ x_MI
        return dx, dw, db, None


class _Call:
    """One call of a layer: where its gradient goes, and whether its product is left out."""

    def __init__(self, take: Taker, leave_out: bool, counted: "_Counts") -> None:
        self.take, self.leave_out, self.counted = take, leave_out, counted

    def offer(self, weight: nn.Parameter, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """A weight that is used twice has two such gradients, neither of which is the whole."""
        return self.take(weight, dy_MO, x_MI, self.counted.uses[id(weight)] == 1)


class Again:
    """The second run of a block, with its linear layers dressed as above."""

    def __init__(self, block: nn.Module) -> None:
        self.layers = [m for m in block.modules() if type(m) is nn.Linear]
        self.useless: dict[bool, int | None] = {}  # which call is the last product, by block.training
        self.block = block

    def run(self, call: Callable[[], Any], take: Taker) -> Any:
        """call() with every linear layer offering its gradient to `take`."""
        mode = self.block.training
        leave_out = self.useless.get(mode)
        counted = _Counts()
        with self._dressed(take, leave_out, counted), torch.autograd.graph.saved_tensors_hooks(counted.save, _same):
            output = call()
        last = counted.calls - 1 if counted.calls and counted.saved == counted.saved_before_last + 1 else None
        self.useless[mode] = last
        if leave_out is not None and leave_out != last:
            return self.run_plainly(call, take)
        return output

    def run_plainly(self, call: Callable[[], Any], take: Taker) -> Any:
        """With nothing left out."""
        with self._dressed(take, None, _Counts()):
            return call()

    @contextmanager
    def _dressed(self, take: Taker, leave_out: int | None, counted: "_Counts") -> Iterator[None]:
        before = [layer.__dict__.get("forward") for layer in self.layers]
        for layer in self.layers:
            layer.forward = _forward(layer, take, leave_out, counted)
        try:
            yield
        finally:
            for layer, forward in zip(self.layers, before, strict=True):
                if forward is None:
                    del layer.forward
                else:
                    layer.forward = forward


class _Counts:
    """Calls of linear layers, and tensors saved for backward."""

    def __init__(self) -> None:
        self.calls = self.saved = self.saved_before_last = 0
        self.uses: Counter[int] = Counter()  # of a weight

    def save(self, x: torch.Tensor) -> torch.Tensor:
        self.saved += 1
        return x


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _forward(layer: nn.Linear, take: Taker, leave_out: int | None, counted: _Counts) -> Callable:
    def forward(x: torch.Tensor) -> torch.Tensor:
        index, counted.calls = counted.calls, counted.calls + 1
        counted.saved_before_last = counted.saved
        counted.uses[id(layer.weight)] += 1
        return _Linear.apply(x, layer.weight, layer.bias, _Call(take, index == leave_out, counted))

    return forward
