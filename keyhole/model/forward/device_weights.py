"""The weights that a pass computes with: a unit's weights on the device, in the dtype of compute.

A home may hold another dtype than kernels compute in, or packed bytes (weights/format.py). So the parameters of a pass
point to:

    a home in the dtype of compute   the slot itself (streamed) or the home itself (resident); no copy
    another dtype, or packed         a copy in scratch memory: a spine, and one buffer of the largest unit per `place`

Bytes on the device: none in the first case; otherwise dtype x (spine + places x largest unit), allocated once, because
cached views of parameters and CUDA graphs hold its address.

Rows of the input embedding are gathered where the table lives: by a kernel that reads device memory or page-locked host
memory, otherwise by the CPU. A *lens* replaces the weights of evaluation and generation by others that it computes from
those at home, unit by unit (methods that evaluate a loss at perturbed weights use one).
Legend: M tokens looked up, V rows of the table, H width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.model.forward.binding import Binding
from keyhole.model.structure.layout import Unit
from keyhole.model.weights.format import PACKED, Wire
from keyhole.offload.engine import Engine


class Lens(Protocol):
    """Computes other weights (such as perturbed ones) from those at home, for evaluation."""

    def weights(self, unit: Unit, stored: torch.Tensor) -> torch.Tensor:
        """The weights of a unit in the dtype of compute; `stored` is the unit on the device as at home."""

    def rows(self, stale_MH: torch.Tensor, ids_M: torch.Tensor) -> torch.Tensor:
        """The rows of the input embedding; stale_MH: these rows at home."""


class DeviceWeights:
    """Weights of units and rows of the table on the device, in the dtype of compute, through the lens if one is set."""

    def __init__(self, engine: Engine, binding: Binding, formats: Wire) -> None:
        self.engine, self.binding, self.homes, self.layout = engine, binding, binding.homes, binding.layout
        self.formats, self.dtype, self.device = formats, formats.dtype, engine.device
        self.lens: Lens | None = None  # set within `seen_through`
        self._scratch: dict[str, torch.Tensor] = {}

    @property
    def is_plain(self) -> bool:
        """Whether every unit is on the device in the dtype of compute, so that the module works without a conductor."""
        plain = not self.engine.streamed and all(home.dtype == self.dtype for home in self.engine.homes)
        return plain and self.lens is None

    def acquire(self, unit: Unit, place: int = 0) -> torch.Tensor:
        """The unit's weights on the device, in the dtype of compute, for reading. Release the unit afterwards."""
        stored = self.engine.acquire(unit.index, changes=False)
        return self.in_compute_dtype(unit, stored, place) if self.lens is None else self.lens.weights(unit, stored)

    def in_compute_dtype(self, unit: Unit, stored: torch.Tensor, place: int = 0) -> torch.Tensor:
        """`stored` itself, or a copy in scratch memory that the next unit with the same `place` overwrites."""
        if stored.dtype == self.dtype:
            return stored
        kind = "spine" if unit.kind == "spine" else f"unit {place}"
        if kind not in self._scratch:  # allocated once: parameters point into it
            numel = unit.numel if kind == "spine" else self.layout.largest_unit_numel
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
        rows_MH = self._rows_at_home(ids_M, pinned)
        return rows_MH if self.lens is None else self.lens.rows(rows_MH, ids_M)

    def _rows_at_home(self, ids_M: torch.Tensor, pinned: bool) -> torch.Tensor:
        """Rows of the input embedding, read from the memory that holds the table."""
        table_VH = self.homes.read(self.layout.table)
        if table_VH.device == self.device or (pinned and ops.use_kernel(self.device)):
            for unit in self.layout.of_kind("table"):
                self.engine.home_ready(unit.index)
            return ops.gather_rows(table_VH, ids_M)
        self.engine.wait_for_homes([unit.index for unit in self.layout.of_kind("table")])
        return table_VH[ids_M.to(table_VH.device)].to(self.device)

    @contextmanager
    def seen_through(self, lens: Lens) -> Iterator[None]:
        """A context in which evaluation and generation use weights that the lens computes from those at home, unit by
        unit."""
        if self.lens is not None:
            raise UserError("closure: the model is seen through another one's weights already; steps do not nest")
        self.lens = lens
        try:
            yield
        finally:
            self.lens = None
            self.binding.bind_homes()
