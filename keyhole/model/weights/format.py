"""Formats of weights at home and on the link, as opposed to the dtype of compute.

    fp32 | bf16 | fp16     a plain dtype; kernels read it and write perturbed copies in the dtype of compute
    fp8                    blocks only: E4M3 codes with a power-of-two scale per 64 elements (ops/fp8.py), 1.016 bytes
                           per element; the spine, the table and the head keep the dtype of compute
    int8 | int4 | nf4      blocks only, and frozen: codes with a float16 scale per 64 elements (frozen.py), 1.03 or 0.53
                           bytes per element of a matrix; vectors, spine, table and head keep the dtype of compute

A unit in a plain format is used directly. A packed unit is bytes. Its codec unpacks it for a forward pass or a
checkpoint, packs it when it is loaded, and applies a zeroth-order update to it, with stochastic rounding. The passes
use the packed values, so the weights of a run are always those at home. A frozen unit is packed once and afterwards
only unpacked.

To add a plain format, add a line to PLAIN; for a packed one, add a codec to CODECS with its kernels in ops/.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.model.structure.layout import Layout, Unit
from keyhole.model.weights import frozen
from keyhole.ops import fp8
from keyhole.ops.lowbit import Grid

PACKED = torch.uint8
PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


FROZEN = frozen.NAMES
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
        self.frozen = frozen.Frozen(grid or Grid(wire), dtype) if wire in FROZEN else None
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
