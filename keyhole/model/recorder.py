"""The one recorder of CUDA graphs: key, room, capture, verify, replay.

A step of small kernels takes as long as the host needs to launch them, one by one. A CUDA graph launches all kernels of
a call at once, but at the memory addresses of its capture. So a call is recorded like this:

    key        all that its launches depend on, except the contents of tensors: shapes, addresses, settings. It is
               captured when it is due: libraries choose kernels and workspaces in the first calls
    room       at most `most` graphs, and no more memory than there is beside the planned step (spare_memory.py)
    capture    the call on static memory, on a stream of its own (one for all: cuBLAS keeps a workspace per stream)
    verify     the first replay has to give the bits of the eager call; else this key runs eagerly from then on. So
               graphs change no number
    replay     copies its inputs into static memory, and launches the graph

All graphs share one memory pool for their temporaries, so any replay may overwrite what another one has left there:
results are copied out, or, of blocks, to static memory by the graph itself. An input has a place for each shape, and is
not copied if that very tensor was copied there last: rotary tables and masks are copied once per pass, not once per
block. Nor if it is the result of another graph in static memory, such as the hidden states: its address is a part of
the key.

A pool is freed with its last graph. One whose capture has failed may be refused later (machine/gpu.py), so the
next capture gets a new one.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from keyhole.machine.gpu import ACCELERATOR, accelerator, capturing
from keyhole.model.spare_memory import SpareMemory
from keyhole.model.structure.layout import FlatTensor

Values = list[Any]
Pool = tuple[int, int]  # a handle of torch's
OTHER_BITS = "a recording gave other bits"
PLAIN = (bool, int, float, str, NoneType, torch.dtype, torch.device)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
KNOWN = ("keyhole.", "transformers.utils.output_capturing")  # modules whose hooks are no user's


class Recording:
    """A CUDA graph, and the value whose tensors it writes."""

    def __init__(self, graph: accelerator.CUDAGraph, result: Any) -> None:
        self.graph, self.result = graph, result
        self.kept: Values = []  # of a block's forward: its autograd graph, if that is kept
        self.offers: list[FlatTensor] = []  # of a block's reverse: tensors whose products the sink has accepted

    def replay(self) -> Any:
        self.graph.replay()
        return self.result


class _Place:
    """Static memory for an input, and the tensor that was last copied there."""

    def __init__(self, value: torch.Tensor) -> None:
        self.memory = value.detach().clone()
        self.source: Callable[[], torch.Tensor | None] = lambda: None
        self.version: int | None = None

    def take(self, value: torch.Tensor) -> torch.Tensor:
        version = None if value.is_inference() else value._version
        if self.source() is not value or version is None or version != self.version:
            self.memory.copy_(value)
            self.source, self.version = weakref.ref(value), version
        return self.memory


class Recorder:
    """Recordings by key, and their static memory. most: how many; sights: a call is captured the so-manieth time."""

    def __init__(self, spare: SpareMemory, most: int, sights: int = 2) -> None:
        self.spare, self.device, self.most, self.sights = spare, spare.device, most, sights
        self.recordings: dict[Hashable, Recording | None] = {}  # None: runs eagerly
        self.seen: Counter[Hashable] = Counter()
        self.why = ""  # the reason of the last capture that failed
        self.pool: Pool | None = None
        self.stream: accelerator.Stream | None = None
        self.places: dict[Hashable, _Place] = {}
        self.fixed: set[int] = set()  # their addresses
        self.results: dict[Hashable, torch.Tensor] = {}  # flat memory for results of graphs
        self.at: dict[int, int] = {}  # address -> bytes, of all of it that a graph may still write to

    def is_due(self, kind: Hashable) -> bool:
        """Counts a call; whether it is to be captured or replayed."""
        self.seen[kind] += 1
        return self.seen[kind] >= self.sights

    def may_run(self, key: Hashable) -> bool:
        """Whether the key has a recording, or may get one."""
        if key in self.recordings:
            return self.recordings[key] is not None
        return len(self.recordings) < self.most and not self.spare.is_spent

    # -- capture, verify, forget -----------------------------------------------------------------------------------

    def capture(self, run: Callable[[], object], pool: Pool | None = None, kind: str = "graphs") -> Recording | None:
        """Captures run(); nothing is computed. None: it cannot be captured. pool: instead of the common one."""
        if self.pool is None or not any(self.recordings.values()):
            self.pool = self.new_pool()
        self.stream = self.stream or accelerator.Stream(self.device)
        graph = accelerator.CUDAGraph()
        accelerator.synchronize(self.device)
        try:
            with self.spare.holding(kind), capturing(graph, self.pool if pool is None else pool, self.stream):
                return Recording(graph, run())
        except BaseException as error:  # a host read, no memory, whatever the model cannot do in a capture
            self.pool, self.why = None, str(error).partition("\n")[0]
            if not isinstance(error, Exception):
                raise
            return None
        finally:
            accelerator.synchronize(self.device)
            own = sum(place.memory.nbytes for place in self.places.values())
            self.spare.held["static memory"] = own + sum(self.at.values())

    def new_pool(self) -> Pool:
        """A pool of memory for temporaries of graphs."""
        return accelerator.graph_pool_handle()

    def verify(self, key: Hashable, one: Recording | None, expected: object) -> None:
        """Keeps a recording if its replay gives the expected bits."""
        same = one is not None and same_bits(one.replay(), expected)
        self.recordings[key] = one if same else None
        self.why = self.why if same or one is None else OTHER_BITS

    def forget(self) -> None:
        """Drops all recordings, and their static memory."""
        if self.device.type == ACCELERATOR:  # the last replay may be running
            accelerator.synchronize(self.device)
        for kept in (self.recordings, self.seen, self.places, self.fixed, self.results, self.at):
            kept.clear()
        self.pool = None
        for kind in ("graphs", "kept graphs", "static memory"):
            self.spare.held.pop(kind, None)

    # -- updates ---------------------------------------------------------------------------------------------------

    def update(self, depends_on: Hashable, run: Callable[[], None]) -> bool:
        """run(), or the replay of it; returns whether it was replayed. The replay cannot be compared, because run
        changes what it reads. So run must launch kernels at addresses that are part of depends_on, and keep nothing
        that it allocates."""
        key = ("update", depends_on)
        alone = self.spare.budget_bytes is not None and not any(self.recordings.values())  # no room for the blocks
        if not alone and self.is_due(key) and self.may_run(key):
            if key not in self.recordings:
                self.recordings[key] = self.capture(run)
            if (one := self.recordings[key]) is not None:
                one.replay()
                return True
        run()
        return False

    # -- static memory ---------------------------------------------------------------------------------------------

    def place_of(self, owner: Hashable, i: int, value: torch.Tensor) -> torch.Tensor:
        """Static memory for input i, with this value in it. owner: inputs of other owners lie elsewhere."""
        if value.data_ptr() in self.at:
            return value
        key = (owner, i, value.shape, value.stride(), value.dtype)
        if key not in self.places:
            self.places[key] = _Place(value)
            self.fixed.add(self.places[key].memory.data_ptr())
        return self.places[key].take(value)

    def copy_in(self, owner: Hashable, values: Values) -> Values:
        """The values with their tensors in static memory."""
        return [self.place_of(owner, i, v) if isinstance(v, torch.Tensor) else v for i, v in enumerate(values)]

    def results_like(self, owner: Hashable, result: Any) -> Any:
        """Static memory for what graphs of this owner leave, like this result; for all shapes the same."""

        def place(i: int, value: torch.Tensor) -> torch.Tensor:
            if not value.is_contiguous():
                return self.place_of(owner, i, value)
            flat = self.results.get((owner, i, value.dtype))
            if flat is None or flat.numel() < value.numel():  # graphs hold the smaller one as long as they write to it
                self.results[owner, i, value.dtype] = flat = torch.empty_like(value).view(-1)
                self.at[flat.data_ptr()] = flat.nbytes
            return flat[: value.numel()].view(value.shape)

        return with_tensors(result, iter([place(i, tensor) for i, tensor in enumerate(tensors_of(result))]))

    def addresses(self, values: Values) -> tuple[int, ...]:
        """Of the values that are results of graphs: a graph that reads them reads them there."""
        return tuple([v.data_ptr() if isinstance(v, torch.Tensor) and v.data_ptr() in self.at else 0 for v in values])


# -- values with tensors in them --------------------------------------------------------------------------------------


def signature_of(value: Any) -> tuple | None:
    """Equal for values that one graph can serve: everything except the contents of their tensors. None: no graph can,
    since the value has a part that might change unnoticed."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return kind, value.shape, value.stride(), value.dtype, value.device
    if kind in PLAIN:
        return kind, value
    if kind not in (tuple, list, dict):
        return None
    parts = [signature_of(part) for part in (value.values() if kind is dict else value)]
    return None if None in parts else (kind, *(value if kind is dict else ()), *parts)


def tensors_of(value: object) -> list[torch.Tensor]:
    """All tensors in a value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The same value with its tensors taken from an iterator."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {name: with_tensors(part, tensors) for name, part in value.items()}
    return type(value)(with_tensors(part, tensors) for part in value) if isinstance(value, tuple | list) else value


def copying(run: Callable[[], object], places: Any) -> Callable[[], Any]:
    """run, whose tensors are copied to those of `places`, which it returns."""

    def copies() -> Any:
        for place, made in zip(tensors_of(places), tensors_of(run()), strict=True):
            place.copy_(made.detach())
        return places

    return copies


def copied(value: Any) -> Any:
    """The same value with copies of its tensors, which no replay overwrites."""
    return with_tensors(value, iter([tensor.detach().clone() for tensor in tensors_of(value)]))


def same_bits(mine: object, theirs: object) -> bool:
    """Whether two values are equal to the bit, and nothing in them could change unnoticed. Waits for the device."""
    signature = signature_of(mine)
    alike = signature is not None and signature == signature_of(theirs)
    return alike and all(map(torch.equal, tensors_of(mine), tensors_of(theirs)))


# -- hooks of the user's, which a replay does not call ----------------------------------------------------------------


class UsersHooks:
    """Whether one of these modules, or all modules, have a hook of the user's. A graph holds kernels and no Python, so
    what has such a hook runs eagerly. Our own hooks belong to what is captured, and Transformers' own act only if a
    caller asks for hidden states. They are looked at only if their number has changed."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables: list[dict[int, object]] = [vars(one)[name] for one in modules for name in HOOKS]
        self._tables += [vars(torch_module)[f"_global{name}"] for name in HOOKS]
        self._count, self._found = -1, False

    def any(self) -> bool:
        """Takes some 30 ns per module and kind of hook."""
        count = sum(map(len, self._tables))
        if count != self._count:
            hooks = [hook for table in self._tables for hook in table.values()]
            self._count, self._found = count, not all(map(is_known, hooks))
        return self._found


def is_known(hook: object) -> bool:
    """Whether it is one of keyhole's own, or of Transformers'."""
    return (getattr(hook, "__module__", None) or "").startswith(KNOWN)
