"""A frozen unit: its matrices in 8 or 4 bits, its vectors in the dtype of compute, in one byte tensor.

    codes     of all matrices of the unit, one after the other (ops/lowbit.py)
    scales    float16, one per group of 64 elements (or as in a published grid, also with offsets: published.py)
    vectors   norms, biases and everything else that is not a matrix, in the dtype of compute

Each part begins at a multiple of 16 bytes. A tensor begins at a multiple of 64 elements of the flat array
(structure/layout.py), so a group never spans two tensors, and each tensor can be packed, unpacked and read alone. The
padding after a tensor whose size is no multiple of 64 is packed as zeros.

A frozen unit is never written after it was loaded: rounding updates to so coarse a grid would add noise of the size of
the weights (40 % of their energy in int4 after 20 thousand steps of 1e-6; docs/base.md). Methods that train factors
beside the weights may use it; others are refused (Model.attach).

Bytes per parameter of a matrix: int4 and nf4 0.531, int8 1.031 (group 64); 0.5625 and 1.0625 (group 32);
with offsets, int4 0.625.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from keyhole.model.structure.layout import FlatTensor, Unit
from keyhole.ops.lowbit import GROUP, KINDS, Grid, lowbit_decode, lowbit_encode_

NAMES = tuple(KINDS)
ALIGN_BYTES = 16
THINNEST = 4  # a tensor with a side of at most this many elements (a short convolution) is not a matrix


def is_matrix(shape: torch.Size) -> bool:
    """Whether a tensor of this shape is packed; others stay as they are."""
    return len(shape) >= 2 and min(shape[-2:]) > THINNEST


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class Span:
    """Elements [begin, end) of a unit, in whole groups, all of matrices or all of vectors; `at`: the number of elements
    of that kind before them."""

    begin: int
    end: int
    packed: bool
    at: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


class Frozen:
    """A format of frozen units. dtype: of vectors. The spans of each unit are cached."""

    def __init__(self, grid: Grid, dtype: torch.dtype) -> None:
        self.grid, self.dtype = grid, dtype
        self._spans: dict[tuple[int, int], list[Span]] = {}

    def describe(self, units: list[Unit]) -> str:
        """A line for the start block."""
        matrices = sum(self._sizes(unit)[0] for unit in units)
        packed = f"{self.grid.name}, {self.grid.per_group}, {self.grid.bytes_per_element:.3f} bytes per weight"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"frozen: {matrices:,} weights of blocks in {packed}; vectors, embedding and head in {dtype}"

    def spans(self, unit: Unit) -> list[Span]:
        """Neighbouring tensors of one kind form one span: a Llama block is one span of matrices and one of vectors."""
        key = (unit.start, unit.stop)
        if key not in self._spans:
            self._spans[key] = list(self._find(unit))
        return self._spans[key]

    def _find(self, unit: Unit) -> Iterator[Span]:
        starts = [t.start - unit.start for t in unit.tensors] + [unit.numel]
        starts[0] = 0  # if a matrix is cut by rows, the unit begins inside of it
        counts, begin = {True: 0, False: 0}, 0
        for i, tensor in enumerate(unit.tensors):
            packed, end = is_matrix(tensor.shape), starts[i + 1]
            if i + 1 < len(unit.tensors) and is_matrix(unit.tensors[i + 1].shape) == packed:
                continue
            yield Span(begin, end, packed, counts[packed])
            counts[packed] += end - begin
            begin = end

    def _sizes(self, unit: Unit) -> tuple[int, int]:
        """Number of elements of matrices, and of vectors."""
        spans = self.spans(unit)
        return sum(s.numel for s in spans if s.packed), sum(s.numel for s in spans if not s.packed)

    def bytes_of(self, unit: Unit) -> int:
        matrices, vectors = self._sizes(unit)
        codes, scales = self.grid.code_bytes(matrices), self.grid.scale_bytes(matrices)
        return _aligned(codes) + _aligned(scales) + _aligned(vectors * self.dtype.itemsize)

    def _codes(self, unit: Unit, home: torch.Tensor, at: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the codes and scales of n elements, from matrix element `at` on."""
        grid, (matrices, _) = self.grid, self._sizes(unit)
        first, last = grid.code_bytes(at), grid.code_bytes(at + n)
        scales_at = _aligned(grid.code_bytes(matrices))
        scales = home[scales_at + grid.scale_bytes(at) : scales_at + grid.scale_bytes(at + n)]
        return home[first:last], scales.view(grid.scale_dtype)

    def _vectors(self, unit: Unit, home: torch.Tensor, at: int, n: int) -> torch.Tensor:
        """A view of n elements of vectors, from element `at` on."""
        matrices, _ = self._sizes(unit)
        begin = _aligned(self.grid.code_bytes(matrices)) + _aligned(self.grid.scale_bytes(matrices))
        b = self.dtype.itemsize
        return home[begin + at * b : begin + (at + n) * b].view(self.dtype)

    def decode(self, unit: Unit, home: torch.Tensor, out: torch.Tensor) -> None:
        """out [unit.numel] <- all weights of the unit, in the dtype of `out`. One kernel launch per span."""
        for span in self.spans(unit):
            part = out[span.begin : span.end]
            if span.packed:
                lowbit_decode(*self._codes(unit, home, span.at, span.numel), part, self.grid)
            else:
                part.copy_(self._vectors(unit, home, span.at, span.numel))

    def _place(self, unit: Unit, tensor: FlatTensor) -> tuple[Span, int]:
        """The span of a tensor, and the index of its first element among those of its kind."""
        begin = tensor.start - unit.start
        span = next(s for s in self.spans(unit) if s.begin <= begin < s.end)
        return span, span.at + begin - span.begin

    def read(self, unit: Unit, tensor: FlatTensor, home: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy of one tensor, in the dtype of compute; unpacked on `device`, returned where the home is."""
        span, at = self._place(unit, tensor)
        n = tensor.shape.numel()
        if not span.packed:
            return self._vectors(unit, home, at, n).clone().view(tensor.shape)
        whole = -(-n // GROUP) * GROUP
        codes, scales = (part.to(device) for part in self._codes(unit, home, at, whole))
        out = torch.empty(whole, dtype=self.dtype, device=device)
        lowbit_decode(codes, scales, out, self.grid)
        return out[:n].to(home.device).view(tensor.shape)

    def write(self, unit: Unit, tensor: FlatTensor, home: torch.Tensor, begin: int, piece: torch.Tensor) -> None:
        """Writes elements of a tensor, from element `begin` on, to its home. piece: for a matrix, flat float32 on the
        device that packs, in whole groups padded with zeros; for a vector, all of it."""
        span, at = self._place(unit, tensor)
        if not span.packed:
            self._vectors(unit, home, at, piece.numel()).copy_(piece)
            return
        codes, scales = self._codes(unit, home, at + begin, piece.numel())
        packed = torch.empty_like(codes, device=piece.device), torch.empty_like(scales, device=piece.device)
        lowbit_encode_(piece, *packed, self.grid)
        codes.copy_(packed[0])
        scales.copy_(packed[1])

    def put_codes(
        self, unit: Unit, tensor: FlatTensor, home: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Writes codes and scales of the same grid to a tensor's home, for weights published on it (published.py)."""
        _, at = self._place(unit, tensor)
        mine, my_scales = self._codes(unit, home, at, tensor.shape.numel())
        mine.copy_(codes)
        my_scales.copy_(scales)
