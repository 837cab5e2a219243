"""One launch per block instead of dozens: CUDA graphs of blocks, shared by all blocks.

A block's forward is some twenty kernels, each enqueued by Python in 10 to 40 us. On a fast GPU, with a small model or
short sequences, the kernels themselves are shorter than that, and the host is the bound. A CUDA graph replays the
sequence by one call, but with the memory addresses it was recorded with. In our lockstep these are the same for every
block: a pass always finds its unit's weights in the same perturbed buffer. So one graph per pass serves all blocks:

    static input <- hidden states;   static vectors <- the block's part of the spine;   replay;   static output

Blocks need not be alike (attention may be local in one and global in the next, a block may scale by its depth), and
a graph does not run Python. Hence: the first time a block would be replayed it is also computed in the ordinary way,
and if a single bit differs, that block is computed in the ordinary way from then on. So is a block that cannot be
recorded (data-dependent shapes, host reads). Graphs change no number.

Bytes per pass: one input and output, one block's vectors. In the graphs' pool: one block's activations.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from keyhole.model.structure.layout import ALIGN, FlatTensor, Unit

SMALL_FLOP = 4e11  # of one block in one pass
MAX_GRAPHS = 16
WARM_UP_STEPS = 2  # in the ordinary way: libraries choose their kernels and reserve their workspaces


class _Recorded:
    """A graph with its static inputs and output."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.inputs: list[torch.Tensor] = []
        self.last: list[torch.Tensor | None] = []
        self.output: Any = None


class BlockGraphs:
    """Wraps the forward of every block of a model in which each block is one unit."""

    def __init__(self, model: Any, blocks: list[nn.Module]) -> None:
        self.model = weakref.proxy(model)  # the model holds us, through its blocks
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(model.device)
        self.recorded: dict[tuple, _Recorded | None] = {}  # None: could not be recorded
        self.seen: dict[tuple, int] = {}
        self.checked: dict[tuple, bool] = {}  # (graph, block) -> whether it gave the ordinary result
        self.vectors: dict[tuple, torch.Tensor] = {}
        self.warm_up_calls = WARM_UP_STEPS * len(blocks)
        self.ordinary = [block.forward for block in blocks]
        for i, (unit, block) in enumerate(zip(model.layout.of_kind("block"), blocks, strict=True)):
            model.patches.forward(block, self._wrap(unit, i))

    def _wrap(self, unit: Unit, i: int) -> Callable:
        vectors = self.model.binding.spine_of[unit.block]
        first = vectors[0].start if vectors else 0
        span = vectors[-1].stop - first if vectors else 0
        adjacent = span <= sum(-(-t.shape.numel() // ALIGN) * ALIGN for t in vectors)  # in the spine
        shape = tuple((t.start - first, t.shape) for t in vectors)

        def forward(*args: Any, **kwargs: Any) -> Any:
            conductor, ordinary = self.model.conductor, self.ordinary[i]
            steady = conductor is not None and conductor.steady
            if not (adjacent and steady and args and self._is_small(unit, args[0])):
                return ordinary(*args, **kwargs)
            addresses = tuple(tensor.param.data_ptr() for tensor in unit.tensors)
            inputs = tuple(_signature(value) for value in (*args, *kwargs.values()))
            key = (conductor.current.index, conductor.block_at_once, addresses, shape, tuple(kwargs), inputs)
            if self._must_wait(key) or self.checked.get((key, unit.index)) is False:
                return ordinary(*args, **kwargs)
            self._use_own_vectors(vectors, first, span, key)
            return self._replay(key, unit.index, ordinary, args, kwargs)

        return forward

    def _is_small(self, unit: Unit, hidden: Any) -> bool:
        """Large products keep the GPU busy for longer than their launch takes; then a graph gains nothing."""
        return 2 * unit.numel * hidden.numel() // hidden.shape[-1] <= SMALL_FLOP

    def _must_wait(self, key: tuple) -> bool:
        self.seen[key] = self.seen.get(key, 0) + 1
        full = key not in self.recorded and len(self.recorded) >= MAX_GRAPHS
        return full or self.seen[key] <= self.warm_up_calls

    def _use_own_vectors(self, vectors: list[FlatTensor], first: int, span: int, key: tuple) -> None:
        """Copies the block's part of the spine to memory that is the same for all blocks, and points there."""
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
        for i, tensor in enumerate(_tensors([*args, *kwargs.values()])):
            if tensor is not one.last[i]:  # masks and rotary tables are the same object from block to block
                one.inputs[i].copy_(tensor)
                one.last[i] = tensor if i else None  # the hidden states are first, and always change
        one.graph.replay()
        if (key, unit) not in self.checked:
            expected = ordinary(*args, **kwargs)
            self.checked[key, unit] = _same(one.output, expected)
            return expected
        return one.output

    def _record(self, ordinary: Callable, args: tuple, kwargs: dict) -> _Recorded | None:
        one = _Recorded()
        one.inputs = [tensor.clone() for tensor in _tensors([*args, *kwargs.values()])]
        one.last = [None] * len(one.inputs)
        template = ordinary(*args, **kwargs)
        outputs = [torch.empty_like(tensor) for tensor in _tensors(template)]
        one.output = _replace(template, iter(outputs))  # not in the pool, where other graphs would overwrite it
        static = iter(one.inputs)
        static_args = tuple(_replace(value, static) for value in args)
        static_kwargs = {name: _replace(value, static) for name, value in kwargs.items()}
        torch.cuda.synchronize(self.model.device)
        try:
            with torch.cuda.stream(self.stream), _no_collection():
                one.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    result = ordinary(*static_args, **static_kwargs)
                    for output, made in zip(outputs, _tensors(result), strict=True):
                        output.copy_(made)
                    del result, made
                finally:
                    one.graph.capture_end()
        except RuntimeError:
            torch.cuda.synchronize(self.model.device)
            return None
        return one


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's garbage collector: it might free a graph of a model that is gone, and that would invalidate the
    recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(_signature(item) for item in value)
    return value if isinstance(value, bool | int | float | str | None) else id(value)


def _tensors(values: Any) -> list[torch.Tensor]:
    """All tensors in values, in order."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, tuple | list):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _replace(value: Any, tensors: Any) -> Any:
    """The same value with its tensors taken from an iterator."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, tuple | list):
        return type(value)(_replace(item, tensors) for item in value)
    return value


def _same(mine: Any, theirs: Any) -> bool:
    """Whether two outputs are equal to the bit. Waits for the device, once per block."""
    a, b = _tensors(mine), _tensors(theirs)
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
