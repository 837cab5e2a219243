"""What parameters point to while units are streamed.

An HF module reads its weights through `nn.Parameter` objects. Re-pointing one (`param.data = view`) takes a
microsecond and moves nothing, so between two calls of a block its parameters can be pointed to other copies of the
weights, perturbed or in another slot. The parameters of the common unit are re-pointed too: those outside of blocks
whenever a pass is resumed, those inside a block when the pass enters that block.

A home may hold another dtype than kernels compute in, or packed bytes (weights/format.py). So the parameters of a pass
point to:

    a home in the dtype of compute   the slot itself (streamed) or the home itself (resident); no copy
    another dtype, or packed         a copy in scratch memory: one common unit, and a largest unit per `place`

Bytes on the device: none in the first case; otherwise dtype x (common + places x largest unit), allocated once, because
cached views of parameters and CUDA graphs hold its address.

Rows of the input embedding are gathered where the table lives: by a kernel that reads device memory or page-locked host
memory, otherwise by the CPU. A *replacement* gives evaluation and generation other weights, computed from
those at home, unit by unit (methods that evaluate a loss at perturbed weights use one).
Legend: M tokens looked up, V rows of the table, H width.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from keyhole import ops
from keyhole.errors import UserError
from keyhole.model.structure.layout import Unit
from keyhole.model.weights.format import PACKED, Wire
from keyhole.model.weights.homes import Homes, view
from keyhole.offload.engine import Engine

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
        self.common: torch.Tensor  # the memory that the parameters of the common unit point into, for the running pass
        blocks = (None, *range(self.layout.block_count))
        self.common_of = {b: [t for t in self.layout.common.tensors if t.block == b] for b in blocks}
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

    def bind(self, unit: Unit | None, flat: torch.Tensor | None, common: torch.Tensor) -> Views:
        """Points the parameters of a block unit into `flat`, and those of the common unit outside of blocks and in the
        unit's block into `common`. (A pass that enters the next block calls `enter_block` for that one.) Returns all of
        them with where they point; last those of the unit, in its order."""
        self.common = common
        if unit is not None and unit.rows is not None:  # there may be thousands of experts: their views are not kept
            self.enter_block(None)
            self.enter_block(unit.block)
            assert flat is not None
            unit.tensors[0].param.data = rows = rows_view(unit, flat)
            return [(unit.tensors[0].param, rows)]
        key = ("unit", None if unit is None or flat is None else (unit.index, flat.data_ptr()), common.data_ptr())
        views = self._kept(key, lambda: self._views_of(unit, flat))
        for param, at in views:
            param.data = at
        return views

    def enter_block(self, block: int | None) -> None:
        """Points those of the common unit in a block (None: outside of all blocks) into the pass's copy of it."""
        for param, at in self._common_views(block):
            param.data = at

    def _views_of(self, unit: Unit | None, flat: torch.Tensor | None) -> Views:
        outside = self._common_views(None)
        if unit is None or flat is None:
            return outside
        own = [(tensor.param, view(flat, tensor, unit.start)) for tensor in unit.tensors]
        return outside + self._common_views(unit.block) + own

    def _common_views(self, block: int | None) -> Views:
        common, start = self.common, self.layout.common.start
        key = ("common", block, common.data_ptr())
        return self._kept(key, lambda: [(t.param, view(common, t, start)) for t in self.common_of[block]])

    def bind_head(self, unit: Unit, flat: torch.Tensor, common: torch.Tensor) -> None:
        """Points the head to the rows of a chunk, and to the part of its bias for these rows."""
        bias = self.head.linear.bias
        if bias is not None:
            tensor = next(t for t in self.common_of[None] if t.param is bias)
            bias = view(common, tensor, self.layout.common.start)[slice(*unit.span)]
        self.head.bind(rows_view(unit, flat), bias)

    def _kept(self, key: tuple, find: Callable[[], Views]) -> Views:
        """The views that were kept under this key, or that are found now."""
        views = self._views.get(key)
        if views is None:
            views = find()
            if self.keep_views:
                self._views[key] = views
        return views


class Replacement(Protocol):
    """Computes other weights (such as perturbed ones) from those at home, for evaluation."""

    def weights(self, unit: Unit, stored: torch.Tensor) -> torch.Tensor:
        """The weights of a unit in the dtype of compute; `stored` is the unit on the device as at home."""

    def rows(self, stale_MH: torch.Tensor, ids_M: torch.Tensor) -> torch.Tensor:
        """The rows of the input embedding; stale_MH: these rows at home."""


class DeviceWeights:
    """Weights of units and rows of the table on the device, in the dtype of compute, or their replacement."""

    def __init__(self, engine: Engine, binding: Binding, formats: Wire) -> None:
        self.engine, self.binding, self.homes, self.layout = engine, binding, binding.homes, binding.layout
        self.formats, self.dtype, self.device = formats, formats.dtype, engine.device
        self.replacement: Replacement | None = None  # set within `replaced_by`
        self._scratch: dict[str, torch.Tensor] = {}

    @property
    def is_plain(self) -> bool:
        """Whether every unit is on the device in the dtype of compute, so that the module works without a conductor."""
        plain = not self.engine.streamed and all(home.dtype == self.dtype for home in self.engine.homes)
        return plain and self.replacement is None

    def acquire(self, unit: Unit, place: int = 0) -> torch.Tensor:
        """The unit's weights on the device, in the dtype of compute, for reading. Release the unit afterwards."""
        stored = self.engine.acquire(unit.index, changes=False)
        other = self.replacement
        return self.in_compute_dtype(unit, stored, place) if other is None else other.weights(unit, stored)

    def in_compute_dtype(self, unit: Unit, stored: torch.Tensor, place: int = 0) -> torch.Tensor:
        """`stored` itself, or a copy in scratch memory that the next unit with the same `place` overwrites."""
        if stored.dtype == self.dtype:
            return stored
        kind = "common" if unit.kind == "common" else f"unit {place}"
        if kind not in self._scratch:  # allocated once: parameters point into it
            numel = unit.numel if kind == "common" else self.layout.largest_unit_numel
            with torch.inference_mode(False):  # an evaluation may be the first to need it, and a later step writes it
                self._scratch[kind] = torch.empty(numel, dtype=self.dtype, device=self.device)
        weights = self._scratch[kind][: unit.numel]
        if stored.dtype == PACKED:
            self.formats.decode(unit, stored, weights)
            return weights
        return weights.copy_(stored)

    def table_rows(self, ids_M: torch.Tensor, pinned: bool) -> torch.Tensor:
        """[M, H] rows of the input embedding. pinned: homes on the host are page-locked, so that kernels can read
        them."""
        table_VH = self.homes.read(self.layout.table)
        if table_VH.device == self.device or (pinned and ops.use_kernel(self.device)):
            for unit in self.layout.of_kind("table"):
                self.engine.home_ready(unit.index)
            rows_MH = ops.gather_rows(table_VH, ids_M)
        else:
            self.engine.wait_for_homes([unit.index for unit in self.layout.of_kind("table")])
            rows_MH = table_VH[ids_M.to(table_VH.device)].to(self.device)
        return rows_MH if self.replacement is None else self.replacement.rows(rows_MH, ids_M)

    @contextmanager
    def replaced_by(self, replacement: Replacement) -> Iterator[None]:
        """A context in which evaluation and generation use weights that it computes from those at home, unit by
        unit."""
        if self.replacement is not None:
            raise UserError("closure: the model is seen through another one's weights already; steps do not nest")
        self.replacement = replacement
        try:
            yield
        finally:
            self.replacement = None
            self.binding.bind_homes()
