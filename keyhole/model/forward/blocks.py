"""Fewer kernels and fewer launches in passes without gradients: blocks through torch.compile, and as CUDA graphs.

**torch.compile**: between two matrix products, one kernel instead of five.

A block spends a third of its time in norms, rotary embeddings, activations and residuals, each of which reads and
writes memory several times; torch.compile fuses them. The compiled function is block.forward itself, with the block as
an argument and its weights as inputs, so that all blocks of one kind share the code. Compiled code cannot stop inside a
block, so it runs only in passes that wait for all units of a block before they enter it (block_at_once, hooks.py).
Passes that will be differentiated use model/backward/block_call.py.

Compiled arithmetic rounds differently from eager arithmetic: streamed still equals resident, but a compiled run does
not equal an eager one. Varying shapes make torch compile again; packing keeps them constant.

**CUDA graphs**: one launch per block instead of dozens, shared by all blocks (model/recorder.py).

A block's forward is some twenty kernels, each launched by Python in 10 to 40 us. On a fast GPU, with a small model or
short sequences, the kernels take less time than that, and the host is the bottleneck. A CUDA graph replays the kernels
by one call, but with the memory addresses of its capture. In lockstep these are the same for every block: a pass always
finds its unit's weights in the same perturbed buffer. So one graph per pass serves all blocks:

    static input <- hidden states;   static vectors <- the block's part of the common unit;   replay;   copy of output

The next replay overwrites the graph's output, and a model may keep a block's output for longer (skip connections, the
hidden states of all layers). So every call returns a copy, which belongs to the caller.

Blocks need not be alike (attention may be local in one and global in the next, a block may scale by its depth), and a
graph does not run Python. So the first time a block would be replayed it also runs eagerly, and if a single bit
differs, that block runs eagerly from then on. The same holds for a block that cannot be captured, one that writes into
its inputs, one whose inputs or outputs could change unnoticed, and one with a hook of the user's.

If layers have low-rank factors (low_rank.py), kernels read the weights at their homes, and the factors of each block
have other addresses. Then each block has a graph of its own, which is valid as long as these addresses do not change.

Memory: one input and output per pass (or block), one block's vectors; in the pool, one block's activations.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.machine.held import Changes
from keyhole.machine.settings import compiler
from keyhole.model.recorder import (
    Recorder,
    UsersHooks,
    copied,
    same_bits,
    signature_of,
    tensors_of,
    with_tensors,
)
from keyhole.model.spare_memory import SpareMemory
from keyhole.model.structure.layout import ALIGN, FlatTensor, Unit

SMALL_FLOP = 4e11  # per block and pass
SMALL_FLOP_WITH_FACTORS = 2e12  # three launches per product: twice the host's work
MOST_GRAPHS = 512
SIGHTS = 3  # a block runs eagerly in two steps: libraries choose their kernels and reserve their workspaces
RECOMPILES = 64


class BlockGraphs(Recorder):
    """Wraps the forward of every block of a model in which each block is one unit."""

    def __init__(self, model: Any, blocks: list[nn.Module]) -> None:
        super().__init__(SpareMemory(None, model.device), MOST_GRAPHS, SIGHTS)
        self.model = weakref.proxy(model)  # the model holds a reference to this object, through its blocks
        self.checked: dict[tuple, bool] = {}  # (graph, block) -> whether the replay equalled the eager result
        self.vectors: dict[tuple, torch.Tensor] = {}
        self.ordinary = [block.forward for block in blocks]
        for i, (unit, block) in enumerate(zip(model.layout.of_kind("block"), blocks, strict=True)):
            model.patches.forward(block, self._wrap(unit, i, block))

    def _wrap(self, unit: Unit, i: int, block: nn.Module) -> Callable:
        vectors = self.model.binding.common_of[unit.block]
        first = vectors[0].start if vectors else 0
        span = vectors[-1].stop - first if vectors else 0
        adjacent = span <= sum(-(-t.shape.numel() // ALIGN) * ALIGN for t in vectors)  # in the common unit
        shape = tuple((t.start - first, t.shape) for t in vectors)
        hooks = UsersHooks(part for part in block.modules() if part is not block)  # its own are called around `forward`

        def forward(*args: Any, **kwargs: object) -> Any:
            conductor, ordinary = self.model.conductor, self.ordinary[i]
            steady = conductor is not None and conductor.steady
            if not (adjacent and steady and args) or hooks.any():
                return ordinary(*args, **kwargs)
            flop = 2 * unit.numel * args[0].numel() // args[0].shape[-1]  # large products take longer than their launch
            if flop > (SMALL_FLOP if self.model.methods.low_rank is None else SMALL_FLOP_WITH_FACTORS):
                return ordinary(*args, **kwargs)
            inputs = signature_of((*args, *kwargs.values()))
            added = None if self.model.methods.low_rank is None else self.model.methods.low_rank.graph_key()
            if inputs is None or (added is None and self.model.methods.low_rank is not None):
                return ordinary(*args, **kwargs)
            addresses = tuple(tensor.param.data_ptr() for tensor in unit.tensors)
            addresses += (self.model.binding.common.data_ptr(),)  # of weights that it shares with other blocks
            key: tuple = (conductor.current.index, conductor.block_at_once, addresses, shape, tuple(kwargs), inputs)
            key = key if added is None else (*key, unit.index, added)
            here = (key, unit.index)
            if not self.is_due(here) or not self.may_run(key) or self.checked.get(here) is False:
                return ordinary(*args, **kwargs)
            self._use_own_vectors(vectors, first, span, key)
            return self._replay(here, ordinary, args, kwargs)

        return forward

    def _use_own_vectors(self, vectors: list[FlatTensor], first: int, span: int, key: tuple) -> None:
        """Copies the block's part of the common unit to memory that all blocks share, and points it there."""
        if key not in self.vectors:
            self.vectors[key] = torch.empty(span, dtype=self.model.dtype, device=self.model.device)
        own, base = self.vectors[key], first - self.model.layout.common.start
        own.copy_(self.model.binding.common[base : base + span])
        for tensor in vectors:
            begin = tensor.start - first
            tensor.param.data = own[begin : begin + tensor.shape.numel()].view(tensor.shape)

    def _replay(self, here: tuple, ordinary: Callable, args: tuple, kwargs: dict[str, object]) -> Any:
        """here: the graph's key, and the block's index."""
        key, tensors = here[0], tensors_of((args, kwargs))
        versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]  # None: has no version
        static = self.copy_in(key, tensors)
        if key not in self.recordings:
            static_args, static_kwargs = with_tensors((args, kwargs), iter(static))
            made = self.capture(lambda: ordinary(*static_args, **static_kwargs))
            self.recordings[key] = None if made is None or signature_of(made.result) is None else made
        one = self.recordings[key]
        if one is None:
            return ordinary(*args, **kwargs)
        output = copied(one.replay())
        if here not in self.checked:
            expected = ordinary(*args, **kwargs)
            changed = any(v is not None and t._version != v for t, v in zip(tensors, versions, strict=True))
            self.checked[here] = not changed and same_bits(output, expected)
            return expected
        return output


def _forward(block: nn.Module, args: tuple, kwargs: dict[str, object]) -> Any:
    return type(block).forward(block, *args, **kwargs)


def prepare_compiling(changes: Changes) -> None:
    """Sets the process settings that compiled blocks need.

    All blocks share one function, with code for each kind of block, each varying dimension, and with or without a
    mask. By default torch stops after 8 variants and runs the rest eagerly, depending on what this process ran first.
    """
    limit = compiler("torch._dynamo", "recompile_limit")
    changes.set(limit, max(RECOMPILES, limit.read()))


def compile_forward(model: Any, backend: str = "inductor") -> None:
    """From now on, passes without gradients and with block_at_once run the model's blocks compiled."""
    if model.layout.has_cut_blocks:
        raise UserError(
            "compile: this model was loaded with blocks cut in several units. Pass keyhole.load(..., "
            "workload=Workload(settings=ZOConfig(compile=True))), or set compile=false"
        )
    if model.layout.parts.tiled_layers:
        raise UserError("compile: this model has matrices that are computed in row tiles; set compile=false")
    prepare_compiling(model.changes)
    run, model_of = torch.compile(_forward, backend=backend), weakref.ref(model)

    def compiled(block: nn.Module, ordinary: Callable) -> Callable:
        def forward(*args: object, **kwargs: object) -> Any:
            conductor = None if torch.is_grad_enabled() or (owner := model_of()) is None else owner.conductor
            if conductor is None or not conductor.block_at_once:
                return ordinary(*args, **kwargs)
            return run(block, args, kwargs)

        return forward

    for i, block in enumerate(model.blocks):
        if model.graphs is None:
            model.patches.forward(block, compiled(block, block.forward))
        else:  # a CUDA graph is captured from compiled code, and compared with it
            model.graphs.ordinary[i] = compiled(block, model.graphs.ordinary[i])
