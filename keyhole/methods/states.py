"""The state of optimizers: masters, moments and momentum, in the formats of one table, for every method that has any.

    FORMATS       how a number is stored: bytes, and how it is rounded when it changes
    States        arrays cut by unit, in host memory or on the device, updated where they are; and how they are saved
    StatePages    states in host memory that are updated on the device

A state that is updated where it lives gives views (`of`). One that is updated on the device travels with its unit,
through an engine of its own, whose pages are the states of units: prefetched, changed in a slot, written back like
weights (offload/engine.py). Arrays are page-locked as a whole.

Rounding to 16 bits is stochastic: a moment that changes by a thousandth of itself would never change if it were rounded
to nearest. Its random bits are a function of seed, step and place, as for weights (ops/rounding/): so streamed equals
resident, a resumed run equals one that was not stopped, and ranks agree. Each array has places of its own (PLACES
apart), or a weight and its moments would be rounded up and down together.

Saved by tensor, under its name and the array's: a state does not depend on where it lived or how many ranks wrote it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from keyhole import ops
from keyhole.disk.tensors import MethodState, Ranges
from keyhole.machine.gpu import ACCELERATOR
from keyhole.offload import arena
from keyhole.offload.engine import Engine
from keyhole.ops.arguments import Scalar

PLACES = 1 << 40  # elements of a model, at most
ALIGN = 256  # bytes


@dataclass(frozen=True)
class Format:
    """How the numbers of a state are stored."""

    dtype: torch.dtype

    @property
    def bytes(self) -> float:
        """Per number."""
        return self.dtype.itemsize

    def lerp_(
        self, state: torch.Tensor, to: torch.Tensor, share: float, at: tuple[int, int, int], scale: Scalar = None
    ) -> None:
        """state <- state + share (scale to - state), in float32, rounded once; at: (place, seed, step). An element for
        which `to` is not finite stays unchanged."""
        place, seed, step = at
        how: dict[str, Any] = {"rounding": "stochastic", "offset": place, "seed": seed, "step": step}
        ops.sgd_update_(state, to, lr=-share, weight_decay=-1.0, scale=scale, **how)


FORMATS = {"float32": Format(torch.float32), "bfloat16": Format(torch.bfloat16)}


@dataclass(frozen=True)
class Piece:
    """[begin, end) of what this rank keeps of a unit; `first`: the index in the tensor of its first element."""

    unit: int
    begin: int
    end: int
    first: int = 0


class States:
    """Arrays by name and unit. numels: for each unit the number of elements that this rank keeps; names: of the arrays;
    device: where they are (None: host memory)."""

    def __init__(
        self,
        numels: Mapping[int, int],
        names: Iterable[str],
        format: str = "float32",
        device: torch.device | None = None,
    ) -> None:
        self.numels, self.format = dict(numels), FORMATS[format]
        places = list(accumulate(self.numels.values(), initial=0))
        self.places = dict(zip(self.numels, places, strict=False))
        dtype, self.numel = self.format.dtype, places[-1]

        def array() -> torch.Tensor:  # pages of host memory are committed when they are written
            host = arena.host_memory(self.numel * dtype.itemsize).view(dtype)
            return host if device is None else torch.zeros(self.numel, dtype=dtype, device=device)

        self.arrays = {name: array() for name in names}

    @property
    def bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.arrays.values())

    def of(self, unit: int, begin: int = 0, end: int | None = None) -> list[torch.Tensor]:
        """Each array's range of a unit."""
        place = self.places[unit]
        at = slice(place + begin, place + (self.numels[unit] if end is None else end))
        return [flat[at] for flat in self.arrays.values()]

    def pin(self, device: torch.device) -> bool:
        """Page-locks all arrays, or none."""
        if all(arena.pin(arena.storage_of(flat), device) for flat in self.arrays.values()):
            return True
        for flat in self.arrays.values():
            arena.unpin(arena.storage_of(flat))
        return False

    def saved(self, name: str, shape: Iterable[int], pieces: list[Piece], whole: bool) -> dict[str, Any]:
        """A tensor's state: views, without a copy. whole: these pieces are all of it, and adjacent."""
        found: dict[str, Any] = {}
        for key, flat in self.arrays.items():
            own = [(p.first, flat[self.places[p.unit] + p.begin : self.places[p.unit] + p.end]) for p in pieces]
            if whole:
                begin, end = (
                    self.places[pieces[0].unit] + pieces[0].begin,
                    self.places[pieces[-1].unit] + pieces[-1].end,
                )
                found[f"{name}/{key}"] = flat[begin:end].view(*shape)
            else:
                found[f"{name}/{key}"] = Ranges(tuple(shape), flat.dtype, [one for one in own if one[1].numel()])
        return found

    def load(self, name: str, pieces: list[Piece], state: MethodState) -> None:
        """Loads a tensor's state, whoever saved it."""
        for piece in pieces:
            for key, flat in zip(self.arrays, self.of(piece.unit, piece.begin, piece.end), strict=True):
                flat.copy_(state.range_of(f"{name}/{key}", piece.first, flat.numel()))


class StatePages:
    """States that are updated on the device: each unit's is a page in host memory, which `acquire` brings to the device
    and `release` writes back, within a `sweep` whose order of units is known. numels: by unit; slots: states that are
    on the device at a time."""

    def __init__(self, numels: Mapping[int, int], format: Format, device: torch.device, slots: int) -> None:
        sizes = [int(numels.get(unit, 0) * format.bytes) for unit in range(max(numels, default=-1) + 1)]
        flat = arena.host_memory(sum(-(-size // ALIGN) * ALIGN for size in sizes))
        if device.type == ACCELERATOR:
            arena.pin(flat, device)
        pieces = flat.split([-(-size // ALIGN) * ALIGN for size in sizes])
        self.homes = [piece[:size].view(format.dtype) for piece, size in zip(pieces, sizes, strict=True)]
        self.units = {unit for unit, home in enumerate(self.homes) if home.numel()}
        self.engine = Engine(self.homes, self.units, device, slot_count=max(2, slots))
        self.bytes = sum(sizes)

    @contextmanager
    def sweep(self, order: list[int]) -> Iterator[None]:
        """A context in which states are used, about in this order of units."""
        with self.engine.sweep("states", order):
            yield
            for unit in list(self.engine.held):
                self.release(unit)

    def acquire(self, unit: int) -> torch.Tensor:
        """A unit's state on the device, until it is released or others take its slot."""
        held = self.engine.held
        if unit in held:
            return held[unit].as_page(self.homes[unit])
        while len(held) >= self.engine.slot_count - 1:
            self.release(next(iter(held)))
        return self.engine.acquire(unit)

    def release(self, unit: int) -> None:
        """Writes a unit's state back, if it is on the device."""
        if unit in self.engine.held:
            self.engine.commit(unit)
            self.engine.release(unit)

    def wait(self) -> None:
        """Blocks until the homes hold all states."""
        self.engine.wait_for_homes()
