"""Formats that weights have at home and on the link, apart from the dtype they are computed in.

    fp32 | bf16 | fp16     a plain dtype; kernels read it and write perturbed copies in the dtype of compute
    fp8                    blocks only: E4M3 codes with a power-of-two scale per 64 elements (ops/fp8.py), 1.016 bytes
                           per element; the spine, the table and the head keep the dtype of compute

A unit in a plain format is used where it lies. A packed unit is unpacked to fp32 on arrival, updated, and packed again
with stochastic rounding; the packed values are the ones that are perturbed: the weights of a run are those at home.
"""

import torch

from keyhole.errors import UserError
from keyhole.model.structure.layout import Unit
from keyhole.ops.fp8 import packed_bytes

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
PACKED = torch.uint8


class Wire:
    """The home format of every unit, for a dtype of compute and a wire format (None: the same dtype)."""

    def __init__(self, dtype: torch.dtype, wire: str | None = None) -> None:
        if wire is not None and wire not in FORMATS:
            raise UserError(f"wire: {wire!r} is not one of {', '.join(FORMATS)}")
        self.dtype = dtype
        self.plain = dtype if wire in (None, "fp8") else FORMATS[wire]
        self.packs_blocks = wire == "fp8"

    def home_dtype(self, unit: Unit) -> torch.dtype:
        return PACKED if self.packs_blocks and unit.kind == "block" else self.plain

    def home_numel(self, unit: Unit) -> int:
        """Elements of the home in its own dtype."""
        return packed_bytes(unit.numel) if self.home_dtype(unit) == PACKED else unit.numel

    def home_bytes(self, unit: Unit) -> int:
        return self.home_numel(unit) * self.home_dtype(unit).itemsize
