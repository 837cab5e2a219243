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
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from keyhole.machine.settings import Changes, compiler
from keyhole.model.backward.activation_store import ActivationStore, HostActivation
from keyhole.model.backward.compiled_linear import linears_offer
from keyhole.model.forward.compile import prepare_compiling

_NO_STORE = ActivationStore(torch.device("cpu"), to_host=False)


def _forward(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, **kwargs)


def _offering_forward(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The same function under another name: torch caches compiled code per function, and must not confuse the two."""
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, **kwargs)


def _kept_forward(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    return type(block).forward(block, *args, **kwargs)


def _kept_offering_forward(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    return type(block).forward(block, *args, **kwargs)


class Compiled:
    """Runs blocks compiled; one instance for all blocks of a model. keep: no recomputation. offer: the device on which
    linear layers offer their gradients (compiled_linear.py); None if they do not."""

    def __init__(self, backend: str, changes: Changes, keep: bool = False) -> None:
        self.offer: torch.device | None = None
        prepare_compiling(changes)
        changes.set(compiler("torch._functorch", "donated_buffer"), False)  # else no graph could run backward twice
        chosen = (_kept_forward, _kept_offering_forward) if keep else (_forward, _offering_forward)
        self.run, self.run_offering = (torch.compile(f, backend=backend) for f in chosen)

    def __call__(self, block: nn.Module, args: tuple, kwargs: dict[str, Any], saved: "Saved") -> Any:
        with self.offering(), torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            return (self.run if self.offer is None else self.run_offering)(block, args, kwargs)

    def without_tape(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The block's output with its graph, for a visit that is recorded: no input waits in host memory."""
        return self(block, args, kwargs, Saved(block, [], _NO_STORE))

    def offering(self) -> AbstractContextManager[None]:
        """A context in which the linear layers of a compiled block offer their gradients, if `offer` is set."""
        return nullcontext() if self.offer is None else linears_offer(self.offer)


class Saved:
    """The tensors saved by one visit of a block: parameters by reference, inputs through the activation store."""

    def __init__(self, block: nn.Module, inputs: list[torch.Tensor], store: ActivationStore) -> None:
        self.params = {p.data_ptr(): p for p in block.parameters()}
        self.inputs = {x.data_ptr() for x in inputs}
        self.store, self.last = store, True
        self.on_host: list[HostActivation] = []

    def pack(self, x: torch.Tensor) -> Any:
        address = x.data_ptr()
        param = self.params.get(address)
        if param is not None and param.shape == x.shape and param.stride() == x.stride():  # not its transpose
            return param
        if address in self.inputs and isinstance(stored := self.store.put(x.detach()), HostActivation):
            self.on_host.append(stored)
            return stored
        return x

    def unpack(self, value: Any) -> torch.Tensor:
        if isinstance(value, nn.Parameter):
            return value.data
        return self.store.get(value, self.last) if isinstance(value, HostActivation) else value
