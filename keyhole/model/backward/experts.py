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
loaded only if that changes its weights (`Sink.unmet`: weight decay). Biases of experts belong to the common unit;
autograd sums their gradients.

For a sink that needs whole stacks (by_expert is False) the same node fills a gradient of the whole stack; such a model
is never cut into experts. Outside of a backward pass of Reverse, autograd differentiates Transformers' own layer.
Legend: T tokens, H width, M tokens of one expert, k experts per token.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from keyhole.model.backward.recompute import Run
from keyhole.model.backward.sink import HandOver
from keyhole.model.forward.binding import rows_view
from keyhole.model.forward.pieces import Routed, activated, add_expert, no_sum, product
from keyhole.model.model import Model
from keyhole.model.structure.find import Experts
from keyhole.model.structure.layout import FlatTensor, Unit

Units = list[list[Unit]] | None
Matrix = tuple[torch.Tensor, torch.Tensor]  # A matrix as stored, and in the dtype of compute.


class ExpertGradients:
    """Runs modules of experts with a graph, and hands their gradients to the sink of a backward pass. first_place: in
    scratch memory (DeviceWeights)."""

    def __init__(self, model: Model, gradients: HandOver, first_place: int) -> None:
        self.model, self.gradients, self.first_place = model, gradients, first_place
        self.calls: Counter[int] = Counter()  # calls per module, in the run that is differentiated next
        self.recomputation: Run | None = None  # the current one
        self.sums: dict[str, torch.Tensor] = {}  # incomplete gradients of the current block, by expert
        self.received: set[str] = set()  # experts of the current block whose gradient was handed over
        self.unit_of = {u.tensors[0].expert(u.expert).name: u for u in model.layout.units if u.expert is not None}

    def run(
        self, experts: Experts, units: Units, routed: list[Routed], x_TH: torch.Tensor, r_Tk: torch.Tensor
    ) -> torch.Tensor:
        """y_TH, with a graph."""
        self.calls[id(experts.module)] += 1
        skipped = self.recomputation is not None and self.recomputation.called(saves=2)
        if units is not None:
            there = [] if skipped else routed
            self.model.expect([units[side][e] for e, _, _ in [*there, *reversed(routed)] for side in (0, 1)])
        layer = self, experts, units, routed, skipped
        y_TH: torch.Tensor = _Layer.apply(x_TH, r_Tk, layer, *experts.stacks, *experts.biases)
        return y_TH

    @contextmanager
    def held(self, experts: Experts, units: Units, expert: int, changes: bool) -> Iterator[list[Matrix]]:
        """The two matrices of an expert; on the device within the context."""
        if units is None:
            yield [(self._stored(stack)[expert], stack.data[expert]) for stack in experts.stacks]
            return
        engine, found = self.model.engine, []
        with ExitStack() as taken:
            for side in (0, 1):
                unit = units[side][expert]
                stored = engine.acquire(unit.index, changes=changes)
                taken.callback(engine.release, unit.index)
                computed = self.model.device_weights.in_compute_dtype(unit, stored, self.first_place + side)
                found.append((rows_view(unit, stored)[0], rows_view(unit, computed)[0]))
            yield found

    def _stored(self, stack: nn.Parameter) -> torch.Tensor:
        return self.gradients.stored.get(id(stack), stack.data)

    def offer(
        self, experts: Experts, stack: nn.Parameter, expert: int, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> None:
        """Takes the gradient a^T b of a matrix that is on the device, and hands it over if it is complete."""
        gradients, tensor = self.gradients, self.gradients.tensors[id(stack)].expert(expert)
        once = self.calls[id(experts.module)] <= 1
        if once and gradients.visited_once and gradients.sink.linear(tensor, w, a, b):
            self._finish(tensor)
            return
        grad, before = a.t() @ b, self.sums.pop(tensor.name, None)
        grad = grad if before is None else before.add_(grad)
        if once and gradients.is_final:
            gradients.sink.gradient(tensor, w, grad)
            self._finish(tensor)
        else:
            self.sums[tensor.name] = grad

    def _finish(self, tensor: FlatTensor) -> None:
        """The expert's gradient was handed over."""
        self.received.add(tensor.name)
        unit = self.unit_of.get(tensor.name)
        if unit is not None and self.gradients.sink.finished(unit):
            self.model.engine.commit(unit.index)

    @torch.no_grad()
    def finish_block(self, block: int) -> None:
        """Called after the last gradient of the block: hands over the remaining sums, and zero for experts that
        received no token, if that changes them."""
        sink, engine = self.gradients.sink, self.model.engine
        stacks = [t for t in self.model.layout.tensors if t.block == block and t.param.requires_grad]
        for stack, expert in [(one, e) for one in stacks for e in range(one.experts)]:
            tensor = stack.expert(expert)
            grad, unit = self.sums.pop(tensor.name, None), self.unit_of.get(tensor.name)
            met = grad is not None or not (tensor.name in self.received or sink.unmet(tensor))
            if met and sink.by_expert:
                stored = self._stored(stack.param)[expert] if unit is None else engine.acquire(unit.index)
                w = stored.view(-1)[: tensor.shape.numel()].view(tensor.shape)
                zero = torch.zeros(tensor.shape, dtype=self.model.dtype, device=w.device) if grad is None else grad
                sink.gradient(tensor, w, zero)
                self._finish(tensor)
                if unit is not None:
                    engine.release(unit.index)
        self.received.clear()
        assert not self.sums, "a gradient was not handed over"

    def forget_calls(self, block: int) -> None:
        """Called before the block is run again."""
        for experts in self.model.layout.experts:
            if self.gradients.tensors[id(experts.stacks[0])].block == block:
                self.calls.pop(id(experts.module), None)

    def drop(self) -> None:
        """Drops gradients, also after a failure."""
        self.calls.clear()
        self.sums.clear()
        self.received.clear()


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, r_Tk: torch.Tensor, layer: tuple, *weights: nn.Parameter) -> torch.Tensor:
        owner, experts, units, routed, skipped = ctx.layer = layer
        ctx.save_for_backward(x_TH, r_Tk)
        if skipped:
            return torch.empty_like(x_TH)
        y_TH = no_sum(x_TH)
        for one in routed:
            with owner.held(experts, units, one[0], changes=False) as [(_, up), (_, down)]:
                add_expert(y_TH, experts, one, [up, down].__getitem__, x_TH, r_Tk)
        return y_TH.to(x_TH.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        owner, experts, units, routed, _ = ctx.layer
        x_TH, r_Tk = ctx.saved_tensors
        wanted, transposed = ctx.needs_input_grad[3:], experts.module.is_transposed
        parameters, by_expert = (*experts.stacks, *experts.biases), owner.gradients.sink.by_expert
        whole = [w and (i > 1 or not by_expert) for i, w in enumerate(wanted)]
        grads: list[Any] = [torch.zeros_like(p.data) if w else None for p, w in zip(parameters, whole, strict=True)]
        dx_TH, dr_Tk = no_sum(x_TH), torch.zeros_like(r_Tk)

        def take(side: int, expert: int, w: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> None:
            a, b = (x_MI, dy_MO) if transposed else (dy_MO, x_MI)
            if grads[side] is not None:
                grads[side][expert] = a.t() @ b
            elif wanted[side]:
                owner.offer(experts, parameters[side], expert, w, a, b)
            if experts.biases and grads[2 + side] is not None:
                grads[2 + side][expert] = dy_MO.sum(dim=0)

        for expert, token_M, choice_M in reversed(routed):
            with owner.held(experts, units, expert, changes=True) as [(w_up, up), (w_down, down)]:
                x_MH = x_TH[token_M]
                u = product(experts, 0, expert, x_MH, up).detach().requires_grad_()
                with torch.enable_grad():
                    h = activated(experts, u)
                h_MI = h.detach()
                y_MH = product(experts, 1, expert, h_MI, down)
                g_MH = dy_TH[token_M].to(dx_TH.dtype)
                dr_Tk[token_M, choice_M] = (g_MH * y_MH).sum(dim=-1).to(r_Tk.dtype)
                dy_MH = (g_MH * r_Tk[token_M, choice_M, None]).to(y_MH.dtype)
                dh = dy_MH @ (down.t() if transposed else down)
                take(1, expert, w_down, dy_MH, h_MI)
                (du,) = torch.autograd.grad(h, u, dh)
                dx_MH = du @ (up.t() if transposed else up)
                take(0, expert, w_up, du, x_MH)
                dx_TH.index_add_(0, token_M, dx_MH.to(dx_TH.dtype))
        return dx_TH.to(x_TH.dtype), dr_Tk, None, *grads
