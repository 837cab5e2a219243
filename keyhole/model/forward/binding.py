"""What parameters point to while units are streamed.

An HF module reads its weights through `nn.Parameter` objects. Re-pointing one (`param.data = view`) takes a
microsecond and moves nothing, so between two calls of a block its parameters can be pointed to other copies of the
weights, perturbed or in another slot. The parameters of the spine are re-pointed too: those outside of blocks whenever
a pass is resumed, those inside a block when the pass enters that block.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from keyhole.model.structure.layout import Unit
from keyhole.model.weights.homes import Homes, view

Views = list[tuple[nn.Parameter, torch.Tensor]]


def rows_view(unit: Unit, flat: torch.Tensor) -> torch.Tensor:
    """[R, H]: the rows of a matrix that a unit holds (a chunk of a table, a tile), from its flat memory. For an expert:
    a stack of one matrix."""
    first, last = unit.span
    shape = (last - first, *unit.tensors[0].shape[1:])
    return flat[: math.prod(shape)].view(shape)


class Binding:
    """Points the parameters of a module into flat memory. keep_views: memory is reused, so views of it are cached."""

    def __init__(self, homes: Homes, head: Any, keep_views: bool) -> None:
        self.homes, self.layout, self.head, self.keep_views = homes, homes.layout, head, keep_views
        self.spine: torch.Tensor  # the memory that the spine's parameters point into, for the running pass
        blocks = (None, *range(self.layout.block_count))
        self.spine_of = {b: [t for t in self.layout.spine.tensors if t.block == b] for b in blocks}
        self._views: dict[tuple, Views] = {}
        self._home_views: Views = []

    def forget(self) -> None:
        """Drops cached views, which keep the memory of an earlier method alive."""
        self._views.clear()
        for tensor in filter(self.homes.is_apart, self.layout.tensors):
            tensor.param.data = tensor.param.data.new_empty(0)

    def bind_homes(self) -> None:
        """Points every parameter to its home, except those of packed and sharded units, which have none."""
        if not self._home_views:
            plain = [t for t in self.layout.tensors if not self.homes.is_apart(t)]
            self._home_views = [(tensor.param, self.homes.read(tensor)) for tensor in plain]
        for param, at in self._home_views:
            param.data = at

    def bind(self, unit: Unit | None, flat: torch.Tensor | None, spine: torch.Tensor) -> None:
        """Points the parameters of a block unit into `flat`, and those of the spine outside of blocks and in the
        unit's block into `spine`. (A pass that enters the next block calls `enter_block` for that one.)"""
        self.spine = spine
        if unit is not None and unit.rows is not None:  # there may be thousands of experts: their views are not kept
            self.enter_block(None)
            self.enter_block(unit.block)
            assert flat is not None
            unit.tensors[0].param.data = rows_view(unit, flat)
            return
        key = ("unit", None if unit is None or flat is None else (unit.index, flat.data_ptr()), spine.data_ptr())
        for param, at in self._kept(key, lambda: self._views_of(unit, flat)):
            param.data = at

    def enter_block(self, block: int | None) -> None:
        """Points the spine's parameters in a block (None: outside of all blocks) into the spine of the running pass."""
        for param, at in self._spine_views(block):
            param.data = at

    def _views_of(self, unit: Unit | None, flat: torch.Tensor | None) -> Views:
        outside = self._spine_views(None)
        if unit is None or flat is None:
            return outside
        own = [(tensor.param, view(flat, tensor, unit.start)) for tensor in unit.tensors]
        return outside + self._spine_views(unit.block) + own

    def _spine_views(self, block: int | None) -> Views:
        spine, start = self.spine, self.layout.spine.start
        key = ("spine", block, spine.data_ptr())
        return self._kept(key, lambda: [(t.param, view(spine, t, start)) for t in self.spine_of[block]])

    def bind_head(self, unit: Unit, flat: torch.Tensor, spine: torch.Tensor) -> None:
        """Points the head to the rows of a chunk, and to the part of its bias for these rows."""
        bias = self.head.linear.bias
        if bias is not None:
            tensor = next(t for t in self.spine_of[None] if t.param is bias)
            bias = view(spine, tensor, self.layout.spine.start)[slice(*unit.span)]
        self.head.bind(rows_view(unit, flat), bias)

    def _kept(self, key: tuple, find: Callable[[], Views]) -> Views:
        """The views that were kept under this key, or that are found now."""
        views = self._views.get(key)
        if views is None:
            views = find()
            if self.keep_views:
                self._views[key] = views
        return views
