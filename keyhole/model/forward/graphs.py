"""One launch per block instead of dozens: CUDA graphs of blocks, shared by all blocks.

A block's forward is some twenty kernels, each launched by Python in 10 to 40 us. On a fast GPU, with a small model or
short sequences, the kernels take less time than that, and the host is the bottleneck. A CUDA graph replays the kernels
by one call, but with the memory addresses of its capture. In lockstep these are the same for every block: a pass always
finds its unit's weights in the same perturbed buffer. So one graph per pass serves all blocks:

    static input <- hidden states;   static vectors <- the block's part of the spine;   replay;   copy of the output

The next replay overwrites the graph's output, and a model may keep a block's output for longer (skip connections, the
hidden states of all layers). So every call returns a copy, which belongs to the caller.

Blocks need not be alike (attention may be local in one and global in the next, a block may scale by its depth), and a
graph does not run Python. So the first time a block would be replayed it also runs eagerly, and if a single bit
differs, that block runs eagerly from then on. The same holds for a block that cannot be captured (data-dependent
shapes, host reads), one that writes into its inputs, and one whose inputs or outputs are other things than tensors,
plain values, and tuples, lists and dicts of these: a graph would not see changes inside them. Graphs change no number.
A block in which a module has a hook of the user's runs eagerly as long as it has one (users_hooks.py).

If layers have low-rank factors (low_rank.py), kernels read the weights at their homes, and the factors of each block
have other addresses. Then each block has a graph of its own, which is valid as long as these addresses do not change.

Bytes per pass (and per block, if each has its own graph): one input and output, one block's vectors. In the memory pool
of the graphs: one block's activations.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from keyhole.machine.gpu import capturing
from keyhole.model.forward.users_hooks import UsersHooks
from keyhole.model.recorder import same_bits, signature_of, tensors_of, with_tensors
from keyhole.model.structure.layout import ALIGN, FlatTensor, Unit

SMALL_FLOP = 4e11  # per block and pass
SMALL_FLOP_WITH_FACTORS = 2e12  # three launches per product: twice the host's work
MAX_GRAPHS, MAX_OWN_GRAPHS = 128, 512
WARM_UP_STEPS = 2  # run eagerly: libraries choose their kernels and reserve their workspaces


class _Recorded:
    """A CUDA graph with its static inputs and output."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.inputs: list[torch.Tensor] = []
        self.last: list[tuple[torch.Tensor, int | None] | None] = []  # the source of each static input, and its version
        self.output: Any = None  # in the pool: must be copied before any other replay


class BlockGraphs:
    """Wraps the forward of every block of a model in which each block is one unit."""

    def __init__(self, model: Any, blocks: list[nn.Module]) -> None:
        self.model = weakref.proxy(model)  # the model holds a reference to this object, through its blocks
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(model.device)
        self.recorded: dict[tuple, _Recorded | None] = {}  # None: the capture failed
        self.seen: dict[tuple, int] = {}
        self.checked: dict[tuple, bool] = {}  # (graph, block) -> whether the replay equalled the eager result
        self.vectors: dict[tuple, torch.Tensor] = {}
        self.warm_up_calls = WARM_UP_STEPS * len(blocks)
        self.ordinary = [block.forward for block in blocks]
        for i, (unit, block) in enumerate(zip(model.layout.of_kind("block"), blocks, strict=True)):
            model.patches.forward(block, self._wrap(unit, i, block))

    def _wrap(self, unit: Unit, i: int, block: nn.Module) -> Callable:
        vectors = self.model.binding.spine_of[unit.block]
        first = vectors[0].start if vectors else 0
        span = vectors[-1].stop - first if vectors else 0
        adjacent = span <= sum(-(-t.shape.numel() // ALIGN) * ALIGN for t in vectors)  # in the spine
        shape = tuple((t.start - first, t.shape) for t in vectors)
        hooks = UsersHooks(part for part in block.modules() if part is not block)  # its own are called around `forward`

        def forward(*args: Any, **kwargs: Any) -> Any:
            conductor, ordinary = self.model.conductor, self.ordinary[i]
            steady = conductor is not None and conductor.steady
            if not (adjacent and steady and args and self._is_small(unit, args[0])) or hooks.any():
                return ordinary(*args, **kwargs)
            addresses = tuple(tensor.param.data_ptr() for tensor in unit.tensors)
            addresses += (self.model.binding.spine.data_ptr(),)  # of weights that it shares with other blocks
            inputs = signature_of((*args, *kwargs.values()))
            if inputs is None:
                return ordinary(*args, **kwargs)
            key: tuple = (conductor.current.index, conductor.block_at_once, addresses, shape, tuple(kwargs), inputs)
            if self.model.low_rank is not None:
                added = self.model.low_rank.graph_key()
                if added is None:
                    return ordinary(*args, **kwargs)
                key = (*key, unit.index, added)
            if self._must_wait(key) or self.checked.get((key, unit.index)) is False:
                return ordinary(*args, **kwargs)
            self._use_own_vectors(vectors, first, span, key)
            return self._replay(key, unit.index, ordinary, args, kwargs)

        return forward

    def _is_small(self, unit: Unit, hidden: Any) -> bool:
        """Large products keep the GPU busy for longer than their launch takes, so a graph gains nothing."""
        limit = SMALL_FLOP if self.model.low_rank is None else SMALL_FLOP_WITH_FACTORS
        return 2 * unit.numel * hidden.numel() // hidden.shape[-1] <= limit

    def _must_wait(self, key: tuple) -> bool:
        self.seen[key] = self.seen.get(key, 0) + 1
        own = self.model.low_rank is not None
        full = key not in self.recorded and len(self.recorded) >= (MAX_OWN_GRAPHS if own else MAX_GRAPHS)
        return full or self.seen[key] <= (WARM_UP_STEPS if own else self.warm_up_calls)

    def _use_own_vectors(self, vectors: list[FlatTensor], first: int, span: int, key: tuple) -> None:
        """Copies the block's part of the spine to memory that all blocks share, and points the parameters there."""
        if key not in self.vectors:
            self.vectors[key] = torch.empty(span, dtype=self.model.dtype, device=self.model.device)
        own, base = self.vectors[key], first - self.model.layout.spine.start
        own.copy_(self.model.binding.spine[base : base + span])
        for tensor in vectors:
            begin = tensor.start - first
            tensor.param.data = own[begin : begin + tensor.shape.numel()].view(tensor.shape)

    def _replay(self, key: tuple, unit: int, ordinary: Callable, args: tuple, kwargs: dict) -> Any:
        if key not in self.recorded:
            self.recorded[key] = self._record(ordinary, args, kwargs)
        one = self.recorded[key]
        if one is None:
            return ordinary(*args, **kwargs)
        tensors = tensors_of([*args, *kwargs.values()])
        versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]  # None: has no version
        for i, now in enumerate(zip(tensors, versions, strict=True)):
            last = one.last[i]  # masks and rotary tables are the same object from block to block
            if last is None or last[0] is not now[0] or last[1] is None or last[1] != now[1]:
                one.inputs[i].copy_(now[0])
                one.last[i] = now if i else None  # input 0, the hidden states, is always new
        one.graph.replay()
        output = with_tensors(one.output, iter([tensor.clone() for tensor in tensors_of(one.output)]))
        if (key, unit) not in self.checked:
            expected = ordinary(*args, **kwargs)
            changed = any(v is not None and t._version != v for t, v in zip(tensors, versions, strict=True))
            self.checked[key, unit] = not changed and same_bits(output, expected)
            return expected
        return output

    def _record(self, ordinary: Callable, args: tuple, kwargs: dict) -> _Recorded | None:
        one = _Recorded()
        one.inputs = [tensor.clone() for tensor in tensors_of([*args, *kwargs.values()])]
        one.last = [None] * len(one.inputs)
        static = iter(one.inputs)
        static_args = tuple(with_tensors(value, static) for value in args)
        static_kwargs = {name: with_tensors(value, static) for name, value in kwargs.items()}
        if not any(self.recorded.values()):  # a pool goes with its last graph, also one that was not kept
            self.pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self.model.device)
        try:
            with capturing(one.graph, self.pool, self.stream):
                one.output = ordinary(*static_args, **static_kwargs)
        except RuntimeError:
            self.pool = torch.cuda.graph_pool_handle()  # the old one may be refused (machine/gpu.py)
            torch.cuda.synchronize(self.model.device)
            return None
        return None if signature_of(one.output) is None else one
