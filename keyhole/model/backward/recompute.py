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

In a compiled block (block_call.py) torch.compile sees two opaque custom operations:

    linear(x, w, b)              y = x w^T + b
    linear_reverse(dy, x, w)     dx = dy w; then dy and x go to the current receiver, and w may change in place

The backward is one operation, so that w cannot change before dx has been computed from it. It is declared to mutate w:
otherwise the compiler could move another read of w, the product of the block's recomputation, behind it. Inductor then
passes w itself, in place. If w is read later on, Inductor passes a copy, and the receiver, which identifies a weight by
its address, raises an error (sink.py) rather than update the copy. PyTorch before 2.13 cannot trace a backward that
is declared to mutate a parameter; there nothing is declared, and only the order of the graph keeps reads of w before
its change (tests compare compiled blocks with plain ones). The backward has a second result, the "gradient" of an
anchor: a zero that is an input of every linear layer. Because of it the operation is never removed as dead code, even
if dx is not needed. The weight itself gets no gradient.
Legend: M tokens, O outputs, I inputs.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from keyhole.machine.held import attribute
from keyhole.model.forward.hooks import replaced_forwards

# (weight, dy_MO, x_MI, used_once) -> whether it accepts. used_once: no other call in the block uses the weight.
Receiver = Callable[[nn.Parameter, torch.Tensor, torch.Tensor, bool], bool]


class Run:
    """One run of a block: who receives gradients, and the call whose product is skipped (by its index)."""

    def __init__(self, receiver: Receiver, skipped: int | None = None) -> None:
        self.receiver, self.skipped = receiver, skipped
        self.calls = 0  # of linear layers and layers of experts
        self.saved_after = 0  # tensors saved for backward after the last of them
        self.uses: Counter[int] = Counter()  # number of calls per weight

    def called(self, saves: int) -> bool:
        """Counts another product, which will save `saves` tensors; whether it is skipped."""
        self.calls, self.saved_after = self.calls + 1, -saves
        return self.calls - 1 == self.skipped

    def save(self, x: torch.Tensor) -> torch.Tensor:
        self.saved_after += 1
        return x

    @property
    def last_product(self) -> int | None:
        """The last call, if nothing was saved after it."""
        return self.calls - 1 if self.calls and self.saved_after == 0 else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, run: Run) -> torch.Tensor:
        skipped = run.called(saves=1)
        run.uses[id(weight)] += 1
        ctx.save_for_backward(x)
        ctx.weight, ctx.run = weight, run
        # no view, so that the model may write into it (Longformer)
        return x.new_empty((*x.shape[:-1], weight.shape[0])) if skipped else F.linear(x, weight, bias).data

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight, run = ctx.saved_tensors, ctx.weight, ctx.run
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        dx = dy @ weight.data if wants_x else None
        dy_MO, x_MI = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        db = dy_MO.sum(dim=0) if wants_bias else None
        if wants_weight and not run.receiver(weight, dy_MO, x_MI, run.uses[id(weight)] == 1):
            return dx, dy_MO.t() @ x_MI, db, None
        return dx, None, db, None


class Recompute:
    """Recomputes one block, whose linear layers offer their gradients."""

    def __init__(self, block: nn.Module) -> None:
        self.layers: list[Any] = [m for m in block.modules() if type(m) is nn.Linear]
        self.last_product: dict[bool, int | None] = {}  # the call that can be skipped, by block.training
        self.block = block

    def run(self, call: Callable[[], Any], receiver: Receiver, experts: Any = None) -> Any:
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

    def run_whole(self, call: Callable[[], Any], receiver: Receiver, experts: Any = None) -> Any:
        """Like `run`, with no product skipped, for a graph whose output is used."""
        with self._offering(Run(receiver), experts):
            return call()

    @contextmanager
    def _offering(self, run: Run, experts: Any) -> Iterator[None]:
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


# -- compiled blocks -------------------------------------------------------------------------------------------------

AddressReceiver = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # (w_OI, dy_MO, x_MI)
TELLS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
_receivers: list[tuple[int, AddressReceiver | None]] = [(0, None)]  # with their threads; the last is current
_anchors: dict[torch.device, torch.Tensor] = {}


@torch.library.custom_op("keyhole::linear", mutates_args=())
def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, anchor: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b)


@_linear.register_fake
def _linear_shape(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, anchor: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@torch.library.custom_op("keyhole::linear_reverse", mutates_args=("w",) if TELLS else ())
def _linear_reverse(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        dx = dy @ w
        receiver = _receivers[-1][1]
        assert receiver is not None, "no backward pass is running"
        receiver(w, dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
    return dx, torch.zeros(1, device=dy.device)


@_linear_reverse.register_fake
def _linear_reverse_shape(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return dy.new_empty((*dy.shape[:-1], w.shape[1])), torch.zeros(1, device=dy.device)


def _setup(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, w, b, _ = inputs
    ctx.save_for_backward(x, w)
    ctx.has_bias = b is not None


def _reverse(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w = ctx.saved_tensors
    db = dy.flatten(0, -2).sum(dim=0) if ctx.has_bias else None
    dx, anchored = torch.ops.keyhole.linear_reverse(dy, x, w)
    return dx, None, db, anchored


_linear.register_autograd(_reverse, setup_context=_setup)


def _linear_forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    # of what was not compiled, only the model's own layers offer, not those that another thread trains by itself
    own = (
        torch.compiler.is_compiling()
        or _receivers[-1][0] == threading.get_ident()
        or torch._C._current_graph_task_id() != -1
    )
    if own and layer.weight.requires_grad and type(layer) is nn.Linear:
        return torch.ops.keyhole.linear(x, layer.weight, layer.bias, _anchors[x.device])
    return F.linear(x, layer.weight, layer.bias)


@contextmanager
def linears_offer(device: torch.device | None, receiver: AddressReceiver | None = None) -> Iterator[None]:
    """A context for forward, recomputation and backward pass of a compiled block, in which linear layers are the
    operations above, if there is a device. receiver: gets their offers, in a backward pass."""
    if device is None:
        yield
        return
    if device not in _anchors:  # must not be created inside compiled code
        _anchors[device] = torch.zeros(1, device=device, requires_grad=True)
    _receivers.append((threading.get_ident(), receiver))
    try:
        with attribute(nn.Linear, "forward").held(_linear_forward):
            yield
    finally:
        _receivers.pop()
        _anchors[device].grad = None
