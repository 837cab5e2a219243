"""Blocks that will be differentiated, through torch.compile: forward, recomputation and backward pass.

The gain of torch.compile is explained in model/forward/compile.py. The compiled function is

    checkpoint(block.forward)

so the compiled backward pass contains the recomputation too, without the operations that no gradient needs. If all
activations are kept (activations: none) the compiled function is block.forward, and its activations are saved. The
block is an argument and its weights are inputs, so that all blocks of one kind share the code. The graph between
forward and backward holds its inputs and parameters. Saved tensors go through `pack` and `unpack`: a parameter is saved
by reference, since its memory may move until then (streamed weights), and an input may wait in host memory
(activation_store.py).

Fewer kernels are still launched by Python and autograd, some twenty per block: with short batches the host is the
bottleneck again. So small blocks are recorded as CUDA graphs (recorded.py), as those that are not compiled, from the
same compiled function; the first replay is compared with an ordinary run to the last bit.

A linear layer of such a block offers its gradient (recompute.py) inside the compiled backward pass. torch.compile sees
two opaque custom operations:

    linear(x, w, b)              y = x w^T + b
    linear_reverse(dy, x, w)     dx = dy w; then dy and x go to the current receiver, and w may change in place

The backward is one operation, so that w cannot change before dx has been computed from it. It is declared to mutate w:
otherwise the compiler could move another read of w, the product of the block's recomputation, behind it. Inductor then
passes w itself, in place. If w is read later on, Inductor passes a copy, and the receiver, which identifies a weight by
its address, raises an error (reverse.py) rather than update the copy. PyTorch before 2.13 cannot trace a backward that
is declared to mutate a parameter; there nothing is declared, and only the order of the graph keeps reads of w before
its change (tests compare compiled blocks with plain ones). The backward has a second result, the "gradient" of an
anchor: a zero that is an input of every linear layer. Because of it the operation is never removed as dead code, even
if dx is not needed. The weight itself gets no gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_unflatten
from torch.utils.checkpoint import checkpoint

from keyhole.machine.settings import Changes, compiler
from keyhole.model.backward.activation_store import ActivationStore, HostActivation
from keyhole.model.backward.block_call import BlockCall, Result, Values
from keyhole.model.forward.compile import prepare_compiling


def _forward(block: nn.Module, keep: bool, args: tuple, kwargs: dict[str, Any]) -> Any:
    run = type(block).forward
    return run(block, *args, **kwargs) if keep else checkpoint(run, block, *args, use_reentrant=False, **kwargs)


def _offering_forward(block: nn.Module, keep: bool, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The same function under another name: torch caches compiled code per function, and must not confuse the two."""
    run = type(block).forward
    return run(block, *args, **kwargs) if keep else checkpoint(run, block, *args, use_reentrant=False, **kwargs)


class Compiled:
    """Blocks compiled; one instance for all blocks of a model. keep: no recomputation. offer: the device on which
    linear layers offer their gradients; None if they do not."""

    def __init__(self, backend: str, changes: Changes, keep: bool = False) -> None:
        self.offer: torch.device | None = None
        self.keep = keep
        prepare_compiling(changes)
        changes.set(compiler("torch._functorch", "donated_buffer"), False)  # else no graph could run backward twice
        self.run, self.run_offering = (torch.compile(f, backend=backend) for f in (_forward, _offering_forward))


class CompiledCall(BlockCall):
    """A call of a block, compiled. What its graph saves: parameters by reference, inputs through the store."""

    def __init__(self, compiled: Compiled, block: nn.Module, store: ActivationStore, args: tuple, kwargs: Any) -> None:
        super().__init__(block.forward, args, kwargs)
        self.compiled, self.block, self.store = compiled, block, store
        self.params = {p.data_ptr(): p for p in block.parameters()}
        self.inputs: set[int] = set()  # addresses

    def run(self, values: Values) -> Result:
        own = self.compiled
        self.inputs = {x.data_ptr() for x in values if isinstance(x, torch.Tensor) and x.requires_grad}
        args, kwargs, _ = tree_unflatten([_fresh(value) for value in values], self.spec)
        with linears_offer(own.offer), torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return (own.run if own.offer is None else own.run_offering)(self.block, own.keep, args, kwargs), []

    def pack(self, x: torch.Tensor) -> torch.Tensor | HostActivation:
        param = self.params.get(x.data_ptr())
        if param is not None and param.shape == x.shape and param.stride() == x.stride():  # not its transpose
            return param
        stored = self.store.put(x.detach()) if x.data_ptr() in self.inputs else x
        if isinstance(stored, HostActivation):
            self.on_host.append(stored)
            return stored
        return x

    def unpack(self, value: torch.Tensor | HostActivation) -> torch.Tensor:
        if isinstance(value, nn.Parameter):
            return value.data
        return value.get() if isinstance(value, HostActivation) else value


def _fresh(value: object) -> Any:
    """The tensor as one that is no view: compiled code is compiled again for views of another shape of tensor."""
    return value if not isinstance(value, torch.Tensor) or value.requires_grad else value.data


# -- linear layers that offer their gradients --------------------------------------------------------------------------

Receiver = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # (w_OI, dy_MO, x_MI)
TELLS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
CHANGED = ("w",) if TELLS else ()
_receivers: list[Receiver | None] = []  # the last one is current
_anchors: dict[torch.device, torch.Tensor] = {}


@torch.library.custom_op("keyhole::linear", mutates_args=())
def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, anchor: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b)


@_linear.register_fake
def _linear_shape(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, anchor: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@torch.library.custom_op("keyhole::linear_reverse", mutates_args=CHANGED)
def _linear_reverse(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        dx = dy @ w
        receiver = _receivers[-1]
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
    if layer.weight.requires_grad and type(layer) is nn.Linear:
        return torch.ops.keyhole.linear(x, layer.weight, layer.bias, _anchors[x.device])
    return F.linear(x, layer.weight, layer.bias)


@contextmanager
def linears_offer(device: torch.device | None, receiver: Receiver | None = None) -> Iterator[None]:
    """A context for forward, recomputation and backward pass of a compiled block, in which linear layers are the
    operations above, if there is a device. receiver: gets their offers, in a backward pass."""
    if device is None:
        yield
        return
    if device not in _anchors:  # must not be created inside compiled code
        _anchors[device] = torch.zeros(1, device=device, requires_grad=True)
    linear: Any = nn.Linear
    before, linear.forward = linear.forward, _linear_forward
    _receivers.append(receiver)
    try:
        yield
    finally:
        _receivers.pop()
        _anchors[device].grad = None
        linear.forward = before
