"""Wire formats: which unit is stored how, and in how many bytes."""

import pytest
import torch

from keyhole.errors import UserError
from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import PACKED, Wire
from tests.model.decoders import config


@pytest.mark.parametrize(("wire", "stored"), [(None, 2), ("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_plain_formats_are_for_every_unit(wire: str | None, stored: int) -> None:
    """Without a format of its own a unit is stored in the dtype of compute."""
    formats = Wire(torch.bfloat16, wire)
    for unit in find_layout(build(config("llama"), torch.bfloat16)).units:
        assert formats.home_bytes(unit) == stored * unit.numel == formats.home_dtype(unit).itemsize * unit.numel


def test_only_blocks_are_packed() -> None:
    """fp8 takes a byte an element and one scale for each 64; the spine, the table and the head stay plain."""
    formats = Wire(torch.bfloat16, "fp8")
    for unit in find_layout(build(config("llama"), torch.bfloat16), max_unit_numel=1).units:
        packed = unit.kind == "block"
        assert (formats.home_dtype(unit) == PACKED) == packed
        assert formats.home_bytes(unit) == (unit.numel * 65 // 64 if packed else 2 * unit.numel)


def test_an_unknown_format_is_refused() -> None:
    """The message lists what there is."""
    with pytest.raises(UserError, match="wire: 'int3' is not one of fp32, bf16, fp16, fp8"):
        Wire(torch.bfloat16, "int3")
