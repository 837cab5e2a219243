"""GGUF: blocks mean the numbers that were packed, and nothing in a header is believed."""

import struct
import sys
from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.disk.gguf import GGUFShard, gguf_files
from keyhole.disk.weight_files import open_shard, stored_tensors, weight_files
from keyhole.errors import UserError
from tests.disk.published import write_gguf

pytest.importorskip("gguf")


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word)) + word.encode()


LLAMA = text("general.architecture") + struct.pack("<I", 8) + text("llama")


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "BF16", "F32"])
def test_numbers_are_those_of_the_package(form: str, tiny_model: Path, tmp_path: Path) -> None:
    """All rows in the order of Transformers."""
    expected = write_gguf(tiny_model, tmp_path / "in", form)
    found = stored_tensors(tmp_path / "in")
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        assert torch.equal(found[name].read(tmp_path / "in", name).float(), numbers)


def test_without_the_package_it_is_named(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tiny_model, tmp_path / "in", "Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"^model: GGUF files are read by the package gguf: pip install gguf"):
        stored_tensors(tmp_path / "in")


def test_the_parts_of_one_model_are_read_and_two_models_are_not(tmp_path: Path) -> None:
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    assert gguf_files(tmp_path) == weight_files(tmp_path) == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UserError, match="not the parts of one model"):
        weight_files(tmp_path)
    (tmp_path / "b.gguf").unlink()
    (tmp_path / "a-00002-of-00002.gguf").unlink()
    with pytest.raises(UserError, match="a-00002-of-00002.gguf is missing: 1 of the 2 parts"):
        weight_files(tmp_path)


def test_a_model_in_parts_is_read(tiny_model: Path, tmp_path: Path) -> None:
    """Later parts say nothing of the model, neither its architecture nor its heads, by which rows are put in order."""
    expected = write_gguf(tiny_model, tmp_path / "in", "Q8_0", parts=3)
    found = stored_tensors(tmp_path / "in")
    assert found.keys() == expected.keys() and len({stored.file for stored in found.values()}) == 2
    for name, numbers in expected.items():
        torch.testing.assert_close(found[name].read(tmp_path / "in", name).float(), numbers)
    model = keyhole.load(str(tmp_path / "in"), device="cpu")
    assert torch.isfinite(model.nll({"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]})[0])


def test_parts_that_were_renamed_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Two parts that changed places, and one that goes by itself."""
    write_gguf(tiny_model, tmp_path / "in", "F16", parts=3)
    one, two, three = sorted((tmp_path / "in").glob("*.gguf"))
    (tmp_path / "alone.gguf").write_bytes(one.read_bytes())
    with pytest.raises(UserError, match="number 0, counted from 0, of 3 parts, and its name does not"):
        open_shard(tmp_path / "alone.gguf")
    two.rename(tmp_path / "aside")
    three.rename(two)
    (tmp_path / "aside").rename(three)
    with pytest.raises(UserError, match="number 2, counted from 0, of 3 parts"):
        stored_tensors(tmp_path / "in")


def header(tensors: int = 0, pairs: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + rest


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
    "is of type 99": header(1, 1, LLAMA + ONE[:-12] + struct.pack("<IQ", 99, 0)),
    "cannot have": header(1, 1, LLAMA + text("output.weight") + struct.pack("<IQQIQ", 2, 33, 1, 2, 0)),
    r"shape \(\), which F32 cannot": header(1, 1, LLAMA + text("output.weight") + struct.pack("<IIQ", 0, 0, 0)),
    r"shape \(0,\), which F32 cannot": header(1, 1, LLAMA + text("output.weight") + struct.pack("<IQIQ", 1, 0, 0, 0)),
    "of no model of architecture": header(1, 1, LLAMA + text("../../etc") + struct.pack("<IQIQ", 1, 32, 0, 0)),
    "in the middle of its": header(1, 1, LLAMA + text("output.weight") + struct.pack("<I", 2**31)),
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
    assert len(stored_tensors(tmp_path / "in")) == len(GGUFShard(tmp_path / "in" / "model.gguf").entries) == 21
    for end in [*range(0, 1200, 7), len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:end])
        with pytest.raises(UserError, match="cannot be read"):
            open_shard(tmp_path / "cut.gguf")
