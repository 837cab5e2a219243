"""Weights at home: where a parameter is stored in flat memory, and how it is written.

A plain home holds the unit's elements in a dtype; a parameter is a view of it (the chunks of a table are adjacent, so a
table is one view). A packed home (format.py) holds bytes; a parameter of it is read as an unpacked copy. To write a
packed home, the tensors of the unit are collected in fp32 and packed when the last one has arrived, both on the compute
device: a CPU packs only 0.2 G elements per second. A frozen unit (format.py) is packed tensor by tensor, a large tensor
in pieces of PIECE elements, so that at most one piece exists unpacked.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator

import torch

from keyhole.errors import UserError
from keyhole.model.structure.layout import ALIGN, FlatTensor, Layout, Unit
from keyhole.model.weights.format import PACKED, Wire, is_matrix
from keyhole.ops.lowbit import Grid, table

PIECE = 1 << 26
Write = Callable[[torch.Tensor], object]
# (flat memory, index of its first element in the tensor): fills the memory.
WritePiece = Callable[[torch.Tensor, int], object]


def view(flat: torch.Tensor, tensor: FlatTensor, start: int) -> torch.Tensor:
    """The tensor's view of `flat`, whose first element has index `start`."""
    begin = tensor.start - start
    return flat[begin : begin + tensor.shape.numel()].view(tensor.shape)


class Homes:
    """The homes of all units, accessed as parameters. Packed homes are unpacked to the dtype of compute and packed on
    `device`. foreign: pages that another process fills."""

    def __init__(
        self,
        layout: Layout,
        flats: list[torch.Tensor],
        formats: Wire,
        device: torch.device,
        foreign: frozenset[int] = frozenset(),
        parts: dict[int, tuple[int, torch.Tensor]] | None = None,
    ) -> None:
        """parts: this rank's part of each sharded page, and the element of the unit at which it begins."""
        self.foreign, self.parts = foreign, parts or {}
        self.layout, self.flats, self.formats, self.device = layout, flats, formats, device
        self._starts = [unit.start for unit in layout.units]
        self._gathered: dict[int, tuple[torch.Tensor, set[str]]] = {}  # packed units that are being filled

    def unit_of(self, tensor: FlatTensor) -> Unit:
        """The unit in which the tensor starts (a table continues into the next ones)."""
        found = bisect_right(self._starts, tensor.start) - 1
        while self.layout.units[found].numel == 0:  # a common unit may hold no tensor
            found -= 1
        return self.layout.units[found]

    def is_packed(self, tensor: FlatTensor) -> bool:
        return self.flats[self.unit_of(tensor).index].dtype == PACKED

    def is_apart(self, tensor: FlatTensor) -> bool:
        """Whether no parameter can point to its home: it is packed, or this rank has only a part of it."""
        return self.unit_of(tensor).index in self.parts or self.is_packed(tensor)

    def own_parts(self, tensor: FlatTensor) -> Iterator[tuple[int, torch.Tensor]]:
        """For a tensor whose units are sharded: (index of the first element in the tensor, elements) of each of this
        rank's parts. A table spans several units."""
        for unit in self.layout.units:
            if unit.index in self.parts and unit.start < tensor.stop and tensor.start < unit.stop:
                begin, flat = self.parts[unit.index]
                first = max(tensor.start, unit.start + begin)
                end = min(tensor.stop, unit.start + begin + flat.numel(), unit.stop)
                if first < end:
                    yield first - tensor.start, flat[first - unit.start - begin : end - unit.start - begin]

    def is_foreign(self, tensor: FlatTensor) -> bool:
        return bool(self.foreign) and self.unit_of(tensor).index in self.foreign

    def read(self, tensor: FlatTensor) -> torch.Tensor:
        """The parameter at its home, in the dtype of its home; for a packed unit, an unpacked copy, as it is saved."""
        unit = self.unit_of(tensor)
        flat = self.flats[unit.index]
        assert unit.index not in self.parts, f"{tensor.name} is sharded"
        if flat.dtype == PACKED and self.formats.frozen is not None:
            return self.formats.frozen.read(unit, tensor, flat, self.device)
        if flat.dtype == PACKED and self.formats.codec is not None:
            unpacked = torch.empty(unit.numel, dtype=self.formats.saved, device=flat.device)
            self.formats.codec.decode(flat, unpacked)
            return view(unpacked, tensor, unit.start)
        strides = torch.empty(tensor.shape, device="meta").stride()
        return flat.as_strided(tensor.shape, strides, flat.storage_offset() + tensor.start - unit.start)

    def fill(self, tensor: FlatTensor, write: Write, write_piece: WritePiece | None = None) -> None:
        """Calls `write` with memory for the parameter, which it fills; or `write_piece` repeatedly with memory for one
        part, if the whole would be too large."""
        if self.is_foreign(tensor):
            write(torch.empty(tensor.shape, dtype=self.formats.dtype))  # advances a random generator
            return
        if self.unit_of(tensor).index in self.parts:
            whole = torch.empty(tensor.shape, dtype=self.parts[self.unit_of(tensor).index][1].dtype)
            write(whole)
            for begin, part in self.own_parts(tensor):
                part.copy_(whole.view(-1)[begin : begin + part.numel()])
            return
        if not self.is_packed(tensor):
            write(self.read(tensor))
            return
        unit = self.unit_of(tensor)
        if self.formats.frozen is not None:
            self._freeze(unit, tensor, write, write_piece)
            return
        if unit.index not in self._gathered:
            self._gathered[unit.index] = torch.zeros(unit.numel, device=self.device), set()
        unpacked, written = self._gathered[unit.index]
        write(view(unpacked, tensor, unit.start))
        written.add(tensor.name)
        if len(written) == len(unit.tensors):
            packed = torch.empty_like(self.flats[unit.index], device=self.device)
            assert self.formats.codec is not None  # frozen formats are packed by _freeze
            self.formats.codec.encode_(unpacked, packed, offset=unit.start, seed=0, step=0, rounding="nearest")
            self.flats[unit.index].copy_(packed)
            del self._gathered[unit.index]

    def _freeze(self, unit: Unit, tensor: FlatTensor, write: Write, write_piece: WritePiece | None) -> None:
        """Packs a tensor in pieces, each on the device."""
        frozen, home, numel = self.formats.frozen, self.flats[unit.index], tensor.shape.numel()
        assert frozen is not None
        step = PIECE if write_piece is not None else max(1, numel)
        for begin in range(0, numel, step):
            n = min(step, numel - begin)
            piece = torch.zeros(-(-n // ALIGN) * ALIGN, device=self.device)
            if write_piece is None:
                write(piece[:n].view(tensor.shape))
            else:
                write_piece(piece[:n], begin)
            if not bool(torch.isfinite(piece).all()):
                raise UserError(f"wire: {tensor.name} holds NaN or infinity: its weights are damaged; fetch them anew")
            frozen.write(unit, tensor, home, begin, piece)

    def takes_codes(self, tensor: FlatTensor, grid: tuple[str, int, str, bool] | None) -> bool:
        """Whether weights that were published on this grid are stored without conversion."""
        frozen = self.formats.frozen
        if frozen is None or not self.is_packed(tensor) or not is_matrix(tensor.shape):
            return False
        return grid is not None and Grid(*grid) == frozen.grid and tensor.shape.numel() % ALIGN == 0

    def put_codes(
        self, tensor: FlatTensor, codes: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor | None = None
    ) -> None:
        """Stores the codes and scales of such weights. levels: the numbers that the codes stand for, by their file."""
        unit, frozen = self.unit_of(tensor), self.formats.frozen
        assert frozen is not None  # takes_codes has said so
        grid = frozen.grid
        if levels is not None and not torch.equal(levels.float().cpu(), table(torch.device("cpu"))[:16]):
            raise UserError(
                f"wire: the codes of {tensor.name} have a table of their own, which is not that of {grid.name}; set "
                "wire=null, and they are unpacked"
            )
        frozen.put_codes(unit, tensor, self.flats[unit.index], codes, scales)
