"""GGUF: blocks mean the numbers that were packed, and nothing in a header is believed."""

import struct
from pathlib import Path

import pytest
import torch

from keyhole.disk.gguf import GGUFShard, gguf_files
from keyhole.disk.gguf_blocks import unpacked
from keyhole.disk.weight_files import open_shard, stored_tensors, weight_files
from keyhole.errors import UserError
from tests.disk.published import packed, text, write_gguf


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_mean_their_numbers(form: str) -> None:
    """As packed number by number; near what was given."""
    w = torch.randn(512, generator=torch.Generator().manual_seed(0))
    raw, held = packed(w, form)
    found = unpacked(torch.frombuffer(bytearray(raw), dtype=torch.uint8), form)
    torch.testing.assert_close(found, held, rtol=1e-6, atol=1e-12)
    assert float((found - w).square().mean()) < 0.02


def test_the_parts_of_one_model_are_read_and_two_models_are_not(tmp_path: Path) -> None:
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    assert gguf_files(tmp_path) == weight_files(tmp_path) == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UserError, match="not the parts of one model"):
        weight_files(tmp_path)


def header(tensors: int = 0, pairs: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + rest


LLAMA = text("general.architecture") + struct.pack("<I", 8) + text("llama")
ONE = text("output_norm.weight") + struct.pack("<IQIQ", 1, 32, 0, 0)
HARMS = {
    "no GGUF file": b"GGUX" + b"\0" * 60,
    "version": b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
    "middle of its header": header(2**62),
    "ends in the middle": header(0, 1, struct.pack("<Q", 2**63)),
    "value of type": header(0, 1, text("a") + struct.pack("<I", 99)),
    "the middle": header(0, 1, text("a") + struct.pack("<IIQ", 9, 4, 2**62)),
    "of its header": header(0, 1, text("a") + struct.pack("<IIQ", 9, 8, 2**40)),
    "architecture": header(1, 0, ONE),
    "before the data of": header(1, 1, LLAMA + ONE),
    "is of type 10": header(1, 1, LLAMA + ONE[:-12] + struct.pack("<IQ", 10, 0)),
    "cannot have": header(1, 1, LLAMA + text("output.weight") + struct.pack("<IQQIQ", 2, 33, 1, 2, 0)),
    "of no model of architecture": header(1, 1, LLAMA + text("../../etc") + struct.pack("<IQIQ", 1, 32, 0, 0)),
    "dimensions": header(1, 1, LLAMA + text("output.weight") + struct.pack("<I", 2**31)),
    "alignment": header(0, 1, text("general.alignment") + struct.pack("<II", 4, 0)),
    "head counts": header(1, 1, LLAMA + text("blk.0.attn_q.weight") + struct.pack("<IQQIQ", 2, 32, 4, 0, 0))
    + b"\0" * 999,
}


@pytest.mark.parametrize("says", HARMS)
def test_what_a_header_says_is_checked(says: str, tmp_path: Path) -> None:
    """Without memory or time for what it claims; the file is named."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(HARMS[says])
    with pytest.raises(UserError, match=f"bad.gguf cannot be read.*{says}"):
        open_shard(path)


def test_any_cut_of_a_file_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """At every byte of its header, and in its data."""
    write_gguf(tiny_model, tmp_path / "in", "F16")
    whole = (tmp_path / "in" / "model.gguf").read_bytes()
    (tmp_path / "in" / "model.gguf").write_bytes(whole)
    assert len(stored_tensors(tmp_path / "in")) == len(GGUFShard(tmp_path / "in" / "model.gguf").keys()) == 21
    for end in [*range(0, 1200, 7), len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:end])
        with pytest.raises(UserError, match="cannot be read"):
            open_shard(tmp_path / "cut.gguf")
