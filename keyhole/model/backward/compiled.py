"""Blocks through torch.compile: between two matrix products, one kernel instead of five.

A block of a decoder spends a third of its time in norms, rotary embeddings, activations and residuals, each several
passes over memory. torch.compile merges them, in the forward and in the reverse. What is compiled is

    checkpoint(block.forward)

so the compiled reverse holds the second run too, and leaves out of it what no gradient needs. All blocks of one kind
share the code: the block is an argument, its weights are inputs. The graph between forward and reverse holds its
inputs and parameters. Saved tensors go through `pack` and `unpack`: a parameter is saved as itself, since its memory
may be elsewhere by then (streamed weights), and an input may wait in host memory (activation_store.py).

Forward passes alone (zeroth-order) have no graph to keep: there it is block.forward itself, by `compile_forward`.

Compiled arithmetic rounds differently from the plain one: streamed still equals resident, but a compiled run does not
equal one that is not. Shapes that vary make it compile again; packing keeps them constant.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import checkpoint

from keyhole.errors import UserError
from keyhole.model.backward.activation_store import Keeper, Kept
from keyhole.model.backward.compiled_linear import linears_offer
from keyhole.model.structure.find import find_blocks

RECOMPILES = 64


def _forward(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, **kwargs)


def _offering_forward(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The same under another name: compiled code is found by its function, and must not be taken for the other's."""
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, **kwargs)


def _plain_forward(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Without a second run, for passes without gradients."""
    return type(block).forward(block, *args, **kwargs)


def _allow_recompiling() -> None:
    """All blocks share one function, with code for each kind of block, dimension that varies, and mask or none. torch
    gives up after 8, and the rest would run plain: by what came first in this process."""
    torch._dynamo.config.recompile_limit = max(RECOMPILES, torch._dynamo.config.recompile_limit)


def compile_forward(model: Any, backend: str = "inductor") -> None:
    """From here on, passes without gradients that meet their blocks at the door run them compiled."""
    if len(model.layout.of_kind("block")) != model.layout.block_count:
        raise UserError(
            "compile: this model was loaded with blocks cut in several units. Pass keyhole.load(..., "
            "workload=Workload(settings=ZOConfig(compile=True))), or set compile=false"
        )
    if model.layout.tiled_layers:
        raise UserError("compile: this model has matrices that are computed in row tiles; set compile=false")
    _allow_recompiling()
    run, model_of = torch.compile(_plain_forward, backend=backend), weakref.ref(model)

    def compiled(block: nn.Module, ordinary: Callable) -> Callable:
        def forward(*args: Any, **kwargs: Any) -> Any:
            conductor = None if torch.is_grad_enabled() or (owner := model_of()) is None else owner.conductor
            if conductor is None or not conductor.whole:
                return ordinary(*args, **kwargs)
            return run(block, args, kwargs)

        return forward

    for i, block in enumerate(find_blocks(model.module)):
        if model.graphs is None:
            block.forward = compiled(block, block.forward)
        else:  # a graph is recorded from, and compared with, what is compiled
            model.graphs.ordinary[i] = compiled(block, model.graphs.ordinary[i])


class Compiled:
    """Runs blocks compiled. One for all blocks of a model. offer: the device on which linear
    layers offer their gradients (compiled_linear.py); None where they do not."""

    def __init__(self, backend: str = "inductor") -> None:
        self.offer: torch.device | None = None
        _allow_recompiling()
        torch._functorch.config.donated_buffer = False  # or no graph could be reversed twice (exact clipping)
        self.run, self.run_offering = (torch.compile(f, backend=backend) for f in (_forward, _offering_forward))

    def __call__(self, block: nn.Module, args: tuple, kwargs: dict[str, Any], saved: "Saved") -> Any:
        with self.offering(), torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            return (self.run if self.offer is None else self.run_offering)(block, args, kwargs)

    def offering(self) -> Any:
        """A context in which linear layers are as they should be in a compiled block."""
        return nullcontext() if self.offer is None else linears_offer(self.offer)


class Saved:
    """What one visit of a block saved: parameters by name, inputs where the keeper has them."""

    def __init__(self, block: nn.Module, inputs: list[torch.Tensor], keeper: Keeper) -> None:
        self.params = {p.data_ptr(): p for p in block.parameters()}
        self.inputs = {x.data_ptr() for x in inputs}
        self.keeper, self.last = keeper, True
        self.kept: list[Kept] = []

    def pack(self, x: torch.Tensor) -> Any:
        where = x.data_ptr()
        if where in self.params and self.params[where].shape == x.shape:
            return self.params[where]
        if where in self.inputs and isinstance(kept := self.keeper.put(x.detach()), Kept):
            self.kept.append(kept)
            return kept
        return x

    def unpack(self, value: Any) -> torch.Tensor:
        if isinstance(value, nn.Parameter):
            return value.data
        return self.keeper.get(value, self.last) if isinstance(value, Kept) else value
