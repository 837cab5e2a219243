"""Safetensors written one tensor at a time."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from keyhole.disk import tensors
from keyhole.disk.tensors import DTYPES, MethodState, write_tensors


def example() -> dict[str, torch.Tensor]:
    made = {f"x.{name}": (torch.arange(30).view(5, 6) % 7).to(dtype) for dtype, name in DTYPES.items()}
    made |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "turned": torch.randn(4, 3).T}
    return made


@pytest.mark.parametrize("piece_bytes", [tensors.PIECE_BYTES, 16])
def test_the_library_reads_what_we_write(tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All dtypes, scalars, empty and transposed tensors come back equal, in pieces of any size."""
    monkeypatch.setattr(tensors, "PIECE_BYTES", piece_bytes)
    made = example()
    write_tensors(tmp_path / "x.safetensors", made)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == made.keys()
    for name, tensor in made.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


def test_method_state_is_a_mapping_of_scalars_and_tensors(tmp_path: Path) -> None:
    """A method's load_state_dict sees one mapping; a tensor is its own copy, not a window into the file."""
    write_tensors(tmp_path / "x.safetensors", {"m": torch.ones(3)})
    state = MethodState({"step_count": 4}, tmp_path / "x.safetensors")
    assert dict(state.items()).keys() == {"step_count", "m"} and len(state) == 2
    state["m"].zero_()
    assert state["step_count"] == 4 and torch.equal(state["m"], torch.ones(3))
    with pytest.raises(KeyError):
        state["missing"]
    assert list(MethodState({}, None)) == []
