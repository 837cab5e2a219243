"""Memory at fixed addresses, from which CUDA graphs (recorded.py) read their inputs and to which they write results.

A graph reads and writes where it did when it was captured. So there is one place per kind of result, and per input that
no graph has written:

    inputs     copied to a place of their shape, unless that very tensor was copied there last: rotary tables and masks
               are copied once per pass, not once per block
    results    a row of one allocation per kind, such as "output of a pass": as many rows as blocks, each as long as the
               longest shape so far; a shorter shape uses the beginning of its row

A result is the next graph's input where it lies. If a longer shape comes, the allocation is made anew, and all graphs,
which have the old addresses, are dropped (`forget`).
"""

import weakref
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch

from keyhole.model.forward.graphs import tensors_of

Values = list[Any]


class _Copied:
    """Static memory for an input, and the tensor that was last copied there."""

    def __init__(self, value: torch.Tensor) -> None:
        self.place = value.detach().clone()
        self.source: Any = lambda: None
        self.version: int | None = None

    def take(self, value: torch.Tensor) -> torch.Tensor:
        version = None if value.is_inference() else value._version
        if self.source() is not value or version is None or version != self.version:
            self.place.copy_(value)
            self.source, self.version = weakref.ref(value), version
        return self.place


class StaticMemory:
    """The places of inputs and results. turn: the index of the pass."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copied: dict[Hashable, _Copied] = {}
        self.places: dict[Hashable, torch.Tensor] = {}  # [rows, most elements]: of results
        self.most: Counter[Hashable] = Counter()  # by place: the elements of the longest shape so far
        self.static: set[int] = set()  # addresses of results

    def forget(self) -> None:
        """Drops all places; a recorder also drops what uses them."""
        for kept in (self.copied, self.places, self.static):
            kept.clear()

    @property
    def nbytes(self) -> int:
        """Of all places."""
        copies = sum(copied.place.nbytes for copied in self.copied.values())
        return copies + sum(place.nbytes for place in self.places.values())

    def is_static(self, tensor: torch.Tensor) -> bool:
        """Whether the next replay may overwrite this tensor."""
        return tensor.data_ptr() in self.static

    def sources_of(self, values: Values) -> tuple[int, ...]:
        """Per tensor its address if a replay has written it there; else 0: it will be copied to static memory."""
        return tuple(t.data_ptr() if self.is_static(t) else 0 for t in tensors_of(values))

    def copy_in(self, turn: Hashable, values: Values) -> Values:
        """The values with their tensors in static memory."""
        found = list(values)
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor) and not self.is_static(value):
                key = (turn, i, value.shape, value.stride(), value.dtype)
                if key not in self.copied:
                    self.copied[key] = _Copied(value)
                found[i] = self.copied[key].take(value)
        return found

    def places_for(self, what: Hashable, row: int, rows: int, like: Values) -> list[torch.Tensor]:
        """Static memory for the tensors of a result. If it has to grow, all recordings are dropped, since they use the
        old addresses; what is allocated again has room for the longest shape so far."""
        found = []
        for i, tensor in enumerate(like):
            key = (what, i, tensor.dtype)
            self.most[key] = numel = max(self.most[key], -(-tensor.numel() // 64) * 64)
            if key not in self.places or self.places[key].shape[1] < numel:
                if key in self.places:
                    self.forget()
                self.places[key] = torch.empty(rows, numel, dtype=tensor.dtype, device=self.device)
            found.append(self.places[key][row, : tensor.numel()].view(tensor.shape))
        self.static |= {place.data_ptr() for place in found}
        return found


def copy_into(places: list[torch.Tensor], value: Any) -> Any:
    """The same value with its tensors copied to these places."""
    left = iter(places)

    def place(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return next(left).copy_(part)
        return type(part)(place(one) for one in part) if isinstance(part, tuple | list) else part

    return place(value)
