"""Formats of weights at home and on the link, as opposed to the dtype of compute.

    fp32 | bf16 | fp16     a plain dtype; kernels read it and write perturbed copies in the dtype of compute
    fp8                    blocks only: E4M3 codes with a power-of-two scale per 64 elements (ops/fp8.py), 1.016 bytes
                           per element; the common unit, the table and the head keep the dtype of compute
    int8 | int4 | nf4      blocks only, and frozen: codes with a float16 scale per 64 elements, 1.03 or 0.53 bytes per
                           element of a matrix; vectors, common, table and head keep the dtype of compute

A unit in a plain format is used directly. A packed unit is bytes. Its codec unpacks it for a forward pass or a
checkpoint, packs it when it is loaded, and applies a zeroth-order update to it, with stochastic rounding. The passes
use the packed values, so the weights of a run are always those at home.

A frozen unit is one byte tensor:

    codes     of all matrices of the unit, one after the other (ops/lowbit.py)
    scales    float16, one per group of 64 elements (or as in a published grid, also with offsets: fit.py)
    vectors   norms, biases and everything else that is not a matrix, in the dtype of compute

Each part begins at a multiple of 16 bytes. A tensor begins at a multiple of 64 elements of the flat array
(structure/layout.py), so a group never spans two tensors, and each tensor can be packed, unpacked and read alone. The
padding after a tensor whose size is no multiple of 64 is packed as zeros. It is never written after it was loaded:
rounding updates to so coarse a grid would add noise of the size of the weights (40 % of their energy in int4 after 20
thousand steps of 1e-6; docs/base.md). Methods that train factors beside the weights may use it; others are refused
(Model.attach). Bytes per parameter of a matrix: int4 and nf4 0.531, int8 1.031 (group 64); 0.5625 and 1.0625 (group
32); with offsets, int4 0.625.

To add a plain format, add a line to PLAIN; for a packed one, add a codec to CODECS with its kernels in ops/.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.model.structure.layout import THINNEST, FlatTensor, Layout, Unit
from keyhole.ops import fp8
from keyhole.ops.lowbit import GROUP, KINDS, Grid, lowbit_decode, lowbit_encode_

PACKED = torch.uint8
PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FROZEN = tuple(KINDS)
ALIGN_BYTES = 16


@dataclass(frozen=True)
class Codec:
    """The kernels of a packed format."""

    # (elements) -> bytes.
    bytes_of: Callable[[int], int]
    # (weights, packed, offset, seed, step, rounding): packs fp32 weights, rounding with the bits of these elements.
    encode_: Callable[..., None]
    # (packed, weights): unpacks into the dtype of `weights`.
    decode: Callable[[torch.Tensor, torch.Tensor], None]
    # (packed, elements, plus, minus, step): a zeroth-order update in place, and both perturbed copies.
    zo_: Callable[..., None]
    # (packed, elements, begin, end) -> views of all bytes that belong to elements [begin, end).
    parts: Callable[[torch.Tensor, int, int, int], list[torch.Tensor]]


CODECS = {"fp8": Codec(fp8.packed_bytes, fp8.fp8_encode_, fp8.fp8_decode, ops.zo_packed_, fp8.packed_parts)}
NAMES = (*PLAIN, *CODECS, *FROZEN)


def bytes_per_element(name: str) -> float:
    """Bytes per element of a block's matrices in a format; a plain one by its dtype."""
    if name in PLAIN:
        return PLAIN[name].itemsize
    return Grid(name).bytes_per_element if name in FROZEN else CODECS[name].bytes_of(64) / 64


class Wire:
    """The home format of every unit, for a dtype of compute and a wire format (None: the same dtype). codec: for packed
    units that can be changed; frozen: for packed units that cannot; each None if there are none. grid: the frozen
    format, if weights were published in a variant of it."""

    def __init__(self, dtype: torch.dtype, wire: str | None = None, grid: Grid | None = None) -> None:
        if wire is not None and wire not in NAMES:
            raise UserError(f"wire: {wire!r} is not one of {', '.join(NAMES)}")
        self.dtype, self.name = dtype, wire
        self.plain = PLAIN.get(wire or "", dtype)
        self.codec = CODECS.get(wire or "")
        self.frozen = Frozen(grid or Grid(wire), dtype) if wire in FROZEN else None
        self.rounds = self.frozen is not None and grid is None  # loading rounds the weights
        self._homes: dict[int, tuple[list[Unit], list[int]]] = {}

    @property
    def saved(self) -> torch.dtype:
        """The dtype in which packed units are saved: that of compute, which holds every fp8 value unless it is float16,
        whose exponents do not reach far enough. A resumed run must find the same weights."""
        return torch.float32 if self.codec is not None and self.dtype == torch.float16 else self.dtype

    @property
    def packs(self) -> bool:
        """Whether blocks are bytes at home, unpacked for every use."""
        return self.codec is not None or self.frozen is not None

    def home_dtype(self, unit: Unit) -> torch.dtype:
        return PACKED if self.packs and unit.kind == "block" else self.plain

    def home_numel(self, unit: Unit) -> int:
        """Number of elements of the home, in its own dtype."""
        if self.home_dtype(unit) != PACKED:
            return unit.numel
        if self.codec is not None:
            return self.codec.bytes_of(unit.numel)
        assert self.frozen is not None  # what is packed has one of them
        return self.frozen.bytes_of(unit)

    def home_bytes(self, unit: Unit) -> int:
        return self.home_numel(unit) * self.home_dtype(unit).itemsize

    def homes(self, layout: Layout) -> list[int]:
        """home_bytes of every unit, computed once."""
        key = id(layout.units)
        if key not in self._homes:
            self._homes[key] = layout.units, [self.home_bytes(unit) for unit in layout.units]
        return self._homes[key][1]

    def decode(self, unit: Unit, home: torch.Tensor, out: torch.Tensor) -> None:
        """out <- the weights of a packed unit, in the dtype of `out`."""
        if self.codec is not None:
            self.codec.decode(home, out)
        elif self.frozen is not None:
            self.frozen.decode(unit, home, out)


# -- frozen units ------------------------------------------------------------------------------------------------------


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
        """Writes codes and scales of the same grid to a tensor's home, for weights published on it (fit.py)."""
        _, at = self._place(unit, tensor)
        mine, my_scales = self._codes(unit, home, at, tensor.shape.numel())
        mine.copy_(codes)
        my_scales.copy_(scales)
