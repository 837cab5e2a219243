"""Formats that weights have at home and on the link, apart from the dtype they are computed in.

    fp32 | bf16 | fp16     a plain dtype; kernels read it and write perturbed copies in the dtype of compute
    fp8                    blocks only: E4M3 codes with a power-of-two scale per 64 elements (ops/fp8.py), 1.016 bytes
                           per element; the spine, the table and the head keep the dtype of compute

A unit in a plain format is used where it lies. A packed unit is bytes. Its codec unpacks it for a forward pass or a
checkpoint, packs it when it is loaded, and applies a zeroth-order update to it, with stochastic rounding. The passes
use the values as packed, so the weights of a run are always those at home.

A new plain format is a line in PLAIN, a new packed one a codec in CODECS with its kernels in ops/.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.model.structure.layout import Unit
from keyhole.ops import fp8

PACKED = torch.uint8
PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Codec:
    """The kernels of a packed format."""

    bytes_of: Callable[[int], int]
    """(elements) -> bytes."""
    encode_: Callable[..., None]
    """(weights, packed, offset, seed, step, rounding): packs fp32 weights, with the rounding bits of these elements."""
    decode: Callable[[torch.Tensor, torch.Tensor], None]
    """(packed, weights): unpacks into the dtype of `weights`."""
    zo_: Callable[..., None]
    """(packed, elements, plus, minus, step): a zeroth-order update in place, and both perturbed copies."""
    parts: Callable[[torch.Tensor, int, int, int], list[torch.Tensor]]
    """(packed, elements, begin, end) -> views of all bytes that belong to elements [begin, end)."""


CODECS = {"fp8": Codec(fp8.packed_bytes, fp8.fp8_encode_, fp8.fp8_decode, ops.zo_packed_, fp8.packed_parts)}


class Wire:
    """The home format of every unit, for a dtype of compute and a wire format (None: the same dtype). codec: of packed
    units, None where there are none."""

    def __init__(self, dtype: torch.dtype, wire: str | None = None) -> None:
        if wire is not None and wire not in PLAIN | CODECS:
            raise UserError(f"wire: {wire!r} is not one of {', '.join(PLAIN | CODECS)}")
        self.dtype = dtype
        self.plain = PLAIN.get(wire, dtype)
        self.codec = CODECS.get(wire)

    def home_dtype(self, unit: Unit) -> torch.dtype:
        return PACKED if self.codec is not None and unit.kind == "block" else self.plain

    def home_numel(self, unit: Unit) -> int:
        """Elements of the home in its own dtype."""
        return self.codec.bytes_of(unit.numel) if self.home_dtype(unit) == PACKED else unit.numel

    def home_bytes(self, unit: Unit) -> int:
        return self.home_numel(unit) * self.home_dtype(unit).itemsize
