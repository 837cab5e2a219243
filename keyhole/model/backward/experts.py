"""Gradients of experts, one expert at a time: only its two matrices and one gradient are on the device.

Autograd would keep every expert used in the recomputation of a block until the block's backward pass is over. Here the
layer is one autograd node that keeps no weights: it saves x and the router's weights r. In the backward pass experts
are loaded in descending order, and each is run again. In most blocks nothing needs the layer's output during
recomputation, so it is skipped (recompute.py); else experts are also loaded for it, in ascending order. For the tokens
M of expert e, u = up_e(x), h = act(u), y = down_e(h), and the gradient g of the sum:

    dr = sum_H(g y)     dy = r g     dh = dy W_down     dW_down = dy^T h
                        du = act'(u) dh     dx = du W_up     dW_up = du^T x

If the gradient of a matrix is complete (one micro-batch, one call of the layer), it is offered to the sink as its
factors, like that of a linear layer (recompute.py). Else gradients are summed per expert until the last micro-batch;
this takes the memory of the gradients of one block. An expert that received no token has a gradient of zero, and is
loaded only if that changes its weights (`Sink.unmet`: weight decay). Biases of experts belong to the spine; autograd
sums their gradients.

For a sink that needs whole stacks (by_expert is False) the same node fills a gradient of the whole stack; such a model
is never cut into experts. Outside of a backward pass of Reverse, autograd differentiates Transformers' own layer.
Legend: T tokens, H width, M tokens of one expert, k experts per token.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from keyhole.model.backward.recompute import Counts
from keyhole.model.forward.experts import Routed, activated, add_up, lower, upper
from keyhole.model.structure.find import Experts
from keyhole.model.structure.layout import FlatTensor, Unit

Units = list[list[Unit]] | None


class ExpertGradients:
    """Runs modules of experts with a graph, and hands their gradients to the sink of a backward pass."""

    def __init__(self, reverse: Any) -> None:
        self.reverse, self.model = weakref.proxy(reverse), reverse.model
        self.tensor = {id(t.param): t for t in self.model.layout.tensors}
        self.calls: Counter[int] = Counter()  # calls per module, in the run that is differentiated next
        self.counts: Counts | None = None  # of the current run; leave_out: the call that is skipped (recompute.py)
        self.leave_out: int | None = None
        self.sums: dict[str, torch.Tensor] = {}  # incomplete gradients of the current block, by expert
        self.received: set[str] = set()  # experts of the current block whose gradient was handed over
        self.unit_of = {u.tensors[0].expert(u.expert).name: u for u in self.model.layout.units if u.expert is not None}

    def run(
        self, experts: Experts, units: Units, routed: list[Routed], x_TH: torch.Tensor, r_Tk: torch.Tensor
    ) -> torch.Tensor:
        """y_TH, with a graph."""
        self.calls[id(experts.module)] += 1
        left_out = self.counts is not None and self.counts.called(saves=2) == self.leave_out
        if units is not None:
            there = [units[side][e] for e, _, _ in routed for side in (0, 1)] if not left_out else []
            self.model.expect(there + [units[side][e] for e, _, _ in reversed(routed) for side in (0, 1)])
        layer = self, experts, units, routed, left_out
        y_TH: torch.Tensor = _Layer.apply(x_TH, r_Tk, layer, *experts.stacks, *experts.biases)
        return y_TH

    @property
    def by_expert(self) -> bool:
        return bool(self.reverse.gradients.sink.policy.by_expert)

    @contextmanager
    def held(self, experts: Experts, units: Units, sides: tuple[int, ...], expert: int) -> Iterator[list[Any]]:
        """(as stored, in the dtype of compute) for each matrix of an expert; on the device within the context."""
        if units is None:
            bound = [experts.stacks[side] for side in sides]
            yield [(self._stored(stack)[expert], stack.data[expert]) for stack in bound]
            return
        engine, found, taken = self.model.engine, [], []
        try:
            for side in sides:
                unit = units[side][expert]
                stored = engine.acquire(unit.index, changes=len(sides) > 1)
                shape = unit.tensors[0].shape[1:]
                taken.append(unit)
                computed = self.model.device_weights.in_compute_dtype(
                    unit, stored, place=self.reverse.most_units + side
                )
                found.append(tuple(flat[: shape.numel()].view(shape) for flat in (stored, computed)))
            yield found
        finally:
            for unit in taken:
                engine.release(unit.index)

    def _stored(self, stack: nn.Parameter) -> torch.Tensor:
        stored: torch.Tensor = self.reverse.gradients.stored.get(id(stack), stack.data)
        return stored

    def offer(
        self, experts: Experts, stack: nn.Parameter, expert: int, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> None:
        """Takes the gradient a^T b of a matrix that is on the device, and hands it over if it is complete."""
        reverse, tensor = self.reverse, self.tensor[id(stack)].expert(expert)
        once = self.calls[id(experts.module)] <= 1
        if once and reverse.gradients.visited_once and reverse.gradients.sink.linear(tensor, w, a, b):
            self.received.add(tensor.name)
            self._finish(tensor)
            return
        grad = a.t() @ b
        before = self.sums.pop(tensor.name, None)
        grad = grad if before is None else before.add_(grad)
        if once and reverse.gradients.is_final:
            self._hand_over(tensor, w, grad)
        else:
            self.sums[tensor.name] = grad

    def _hand_over(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        self.reverse.gradients.sink.gradient(tensor, w, grad)
        self.received.add(tensor.name)
        self._finish(tensor)

    def _finish(self, tensor: FlatTensor) -> None:
        unit = self.unit_of.get(tensor.name)
        if unit is not None and self.reverse.gradients.sink.finished(unit):
            self.model.engine.commit(unit.index)

    @torch.no_grad()
    def finish_block(self, block: int) -> None:
        """Called after the last gradient of the block: hands over the remaining sums, and zero for experts that
        received no token, if that changes them."""
        if self.by_expert:
            for stack in (t for t in self.model.layout.tensors if t.block == block and t.param.requires_grad):
                for expert in range(stack.experts):
                    self._finish_expert(stack, expert)
        self.received.clear()
        assert not self.sums, "a gradient was not handed over"

    def _finish_expert(self, stack: FlatTensor, expert: int) -> None:
        tensor = stack.expert(expert)
        grad = self.sums.pop(tensor.name, None)
        if grad is None and (tensor.name in self.received or self.reverse.gradients.sink.unmet(tensor)):
            return
        unit, engine = self.unit_of.get(tensor.name), self.model.engine
        stored = self._stored(stack.param)[expert] if unit is None else engine.acquire(unit.index)
        w = stored.view(-1)[: tensor.shape.numel()].view(tensor.shape)
        zero = torch.zeros(tensor.shape, dtype=self.model.dtype, device=w.device) if grad is None else grad
        self._hand_over(tensor, w, zero)
        if unit is not None:
            engine.release(unit.index)

    def forget_calls(self, block: int) -> None:
        """Called before the block is run again."""
        for experts in self.model.layout.experts:
            if self.tensor[id(experts.stacks[0])].block == block:
                self.calls.pop(id(experts.module), None)

    def drop(self) -> None:
        """Drops gradients, also after a failure."""
        self.calls.clear()
        self.sums.clear()
        self.received.clear()


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, r_Tk: torch.Tensor, layer: tuple, *weights: nn.Parameter) -> torch.Tensor:
        owner, experts, units, routed, left_out = ctx.layer = layer
        ctx.save_for_backward(x_TH, r_Tk)
        if left_out:
            return torch.empty_like(x_TH)
        with _one_at_a_time(owner, experts, units) as weigh:
            return add_up(experts, routed, weigh, x_TH, r_Tk)

    @staticmethod
    def backward(ctx: Any, dy_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        owner, experts, units, routed, _ = ctx.layer
        x_TH, r_Tk = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        parameters = (*experts.stacks, *experts.biases)
        whole = [w and (i > 1 or not owner.by_expert) for i, w in enumerate(wanted)]
        grads: list[Any] = [torch.zeros_like(p.data) if w else None for p, w in zip(parameters, whole, strict=True)]
        dx_TH = torch.zeros(x_TH.shape, dtype=torch.promote_types(x_TH.dtype, torch.float32), device=x_TH.device)
        dr_Tk = torch.zeros_like(r_Tk)

        def take(side: int, expert: int, w: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> None:
            a, b = (x_MI, dy_MO) if experts.module.is_transposed else (dy_MO, x_MI)
            if grads[side] is not None:
                grads[side][expert] = a.t() @ b
            elif wanted[side]:
                owner.offer(experts, parameters[side], expert, w, a, b)
            if experts.biases and grads[2 + side] is not None:
                grads[2 + side][expert] = dy_MO.sum(dim=0)

        for expert, token_M, choice_M in reversed(routed):
            with owner.held(experts, units, (0, 1), expert) as [(w_up, up), (w_down, down)]:
                x_MH = x_TH[token_M]
                u = upper(experts, expert, x_MH, up).detach().requires_grad_()
                with torch.enable_grad():
                    h = activated(experts, u)
                h_MI = h.detach()
                y_MH = lower(experts, expert, h_MI, down)
                g_MH = dy_TH[token_M].to(dx_TH.dtype)
                dr_Tk[token_M, choice_M] = (g_MH * y_MH).sum(dim=-1).to(r_Tk.dtype)
                dy_MH = (g_MH * r_Tk[token_M, choice_M, None]).to(y_MH.dtype)
                dh = dy_MH @ (down.t() if experts.module.is_transposed else down)
                take(1, expert, w_down, dy_MH, h_MI)
                (du,) = torch.autograd.grad(h, u, dh)
                dx_MH = du @ (up.t() if experts.module.is_transposed else up)
                take(0, expert, w_up, du, x_MH)
                dx_TH.index_add_(0, token_M, dx_MH.to(dx_TH.dtype))
        return dx_TH.to(x_TH.dtype), dr_Tk, None, *grads


@contextmanager
def _one_at_a_time(owner: ExpertGradients, experts: Experts, units: Units) -> Iterator[Callable]:
    """weigh(side, expert): the matrix, valid until the next call."""
    before: list[Any] = []

    def leave() -> None:
        if before:
            before.pop().__exit__(None, None, None)

    def weigh(side: int, expert: int) -> torch.Tensor:
        leave()
        held = owner.held(experts, units, (side,), expert)
        ((_, computed),) = held.__enter__()
        before.append(held)
        return computed

    try:
        yield weigh
    finally:
        leave()
