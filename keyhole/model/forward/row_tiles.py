"""Linear layers whose matrix is too large to be on the device at once, computed in tiles of output rows.

    y = x W^T + b        y[:, r0:r1] = x W[r0:r1]^T + b[r0:r1]        for each tile [r0, r1)

A tile is a unit of its own: the pass visits tile after tile, and slots and perturbed copies need room for one tile only
(OPT-175B in 16 bit: 288 MiB instead of 1152). The bias belongs to the spine, since all tiles need it.

The product of some rows may differ in its last bits from the same rows of the full product, because a library may
choose another kernel for another shape. To keep streamed and resident equal to the bit, the tiles depend only on the
layer's shape (find.row_tiles), and a layer that has tiles is always computed in them, wherever its weights live. The
result equals the full product within rounding. With gradients the product is not tiled, because those methods hold full
matrices.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from keyhole.errors import UserError
from keyhole.model.structure.find import find_blocks, row_tiles
from keyhole.model.structure.layout import Unit


class RowTiles:
    """The tiles of one layer. units: one per tile, if the layer is cut; None if its whole weight is bound."""

    def __init__(self, model: Callable[[], Any], layer: Any, rows: list[tuple[int, int]], units: list[Unit] | None):
        self.model, self.layer, self.rows, self.units = model, weakref.ref(layer), rows, units

    def weight(self, tile: int) -> torch.Tensor:
        """[rows, I] of a tile, bound for the running pass."""
        conductor = self.model().conductor
        layer: Any = self.layer()
        if self.units is None or conductor is None:
            return layer.weight[slice(*self.rows[tile])]
        current = conductor.current
        if current.unit is not self.units[tile]:
            current.meet(self.units[tile])
        return layer.weight  # now bound to these rows


def compute_in_tiles(model: Any) -> dict[int, RowTiles]:
    """Gives every linear layer of the blocks that has tiles a forward that loops over tiles; returns them by id."""
    units: dict[int, list[Unit]] = {}
    for unit in model.layout.of_kind("block"):
        if unit.rows is not None:
            units.setdefault(id(unit.tensors[0].param), []).append(unit)
    found = {}
    for block in find_blocks(model.module):
        layer: Any
        for layer in block.modules():
            if rows := row_tiles(layer):
                tiles = RowTiles(weakref.ref(model), layer, rows, units.get(id(layer.weight)))
                model.patches.forward(layer, _forward(layer, tiles))
                found[id(layer)] = tiles
    return found


def _forward(layer: Any, tiles: RowTiles) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            if tiles.units is not None and tiles.model().conductor is not None:
                raise UserError(
                    "this model was loaded for forward passes only, with large matrices cut by rows: gradients need "
                    "whole ones. Pass keyhole.load(..., workload=Workload(method=...)) with the method that will run"
                )
            return F.linear(x, layer.weight, layer.bias)
        y: Any = None
        for i, (first, last) in enumerate(tiles.rows):
            weight_RI = tiles.weight(i)
            part = F.linear(x, weight_RI, None if layer.bias is None else layer.bias[first:last])
            if y is None:
                y = part.new_empty(*part.shape[:-1], tiles.rows[-1][1])
            y[..., first:last] = part
        return y

    return forward
