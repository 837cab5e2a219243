"""The V of periods as files: a resume and a replay with them, damage, and a disk that takes none."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import keyhole
from keyhole.cli import main
from keyhole.errors import UserError
from tests.model.candidates import ragged
from tests.model.decoders import load

GUIDED: dict[str, Any] = {"rank": 1, "refresh": 3, "guide": 64}
SETTINGS = ["method=zo", "zo.rank=1", "zo.refresh=4", "zo.guide=16", "learning_rate=1e-3", "batch_size=4", "device=cpu"]
SETTINGS += ["model=demo", "train_data=demo", "save_total_limit=5", "eval_data=null", "report_to=none"]


def final(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def test_a_run_is_resumed_from_its_journal_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """11 steps at once; resumed by the journal from the checkpoint of step 3, in the middle of a period; and a replay
    without data."""
    whole, parts, replayed = (tmp_path / name for name in ("whole", "parts", "replayed"))
    assert main(["train", *SETTINGS, "max_steps=11", f"output_dir={whole}"]) == 0
    assert sorted(p.name for p in (whole / "run" / "directions").iterdir()) == [
        f"{i:06d}.safetensors" for i in range(3)
    ]
    assert main(["train", *SETTINGS, "max_steps=11", "save_steps=3", f"output_dir={parts}"]) == 0
    journal = parts / "run" / "journal"
    assert main(["replay", "demo", str(journal), str(replayed)]) == 0
    (parts / "model.safetensors").unlink()
    shutil.rmtree(parts / "checkpoint-6")
    assert main(["train", *SETTINGS, "max_steps=11", "save_steps=3", f"output_dir={parts}", "--resume"]) == 0
    expected = final(whole)
    for found in (final(replayed), final(parts)):
        assert expected.keys() == found.keys() and all(torch.equal(expected[k], found[k]) for k in expected)
    (parts / "run" / "directions" / "000001.safetensors").unlink()
    assert main(["replay", "demo", str(journal), str(tmp_path / "again")]) == 2
    assert "000001.safetensors cannot be read" in capsys.readouterr().err


def kept_in(zo: keyhole.ZO, directory: Path, run: str) -> None:
    zo.guide.directory, zo.guide.run = directory, run


def test_damaged_directions_are_found(tmp_path: Path) -> None:
    """A flipped bit anywhere in the file of a period is refused, as are files of another run, model or period: their
    checksum may be right, and the weights would be wrong."""
    zo = keyhole.ZO(load("llama"), 1e-3, **GUIDED)
    kept_in(zo, tmp_path, "one")
    zo.step([ragged()])
    (path,), v = tmp_path.iterdir(), zo.factors.v.clone()
    zo.guide.read()
    whole = path.read_bytes()
    assert torch.equal(zo.factors.v, v)
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(UserError, match=path.name):
            zo.guide.read()
    path.write_bytes(whole)
    kept_in(zo, tmp_path, "another")
    with pytest.raises(UserError, match="another run"):
        zo.guide.read()
    with pytest.raises(UserError, match="not the directions of this model"):
        other = keyhole.ZO(load("llama"), 1e-3, **GUIDED | {"rank": 2})
        kept_in(other, tmp_path, "one")
        other.guide.read()
    kept_in(zo, tmp_path, "one")
    for i in range(3):
        zo.step([ragged(seed=i)])
    path.rename(tmp_path / "000001.safetensors")
    with pytest.raises(UserError, match="000001.safetensors is damaged, or of another run or period"):
        zo.guide.read()


def test_directions_that_cannot_be_written_change_nothing(tmp_path: Path) -> None:
    """The step is refused before it begins; with room it is the step that it would have been."""
    plain, zo = (keyhole.ZO(load("llama"), 1e-3, **GUIDED) for _ in range(2))
    expected = [float(plain.step([ragged(seed=i)])) for i in range(2)]
    kept_in(zo, tmp_path / "file" / "directions", "one")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        zo.step([ragged(seed=0)])
    assert zo.step_count == 0 and zo.rows_ahead is not None
    (tmp_path / "file").unlink()
    assert [float(zo.step([ragged(seed=i)])) for i in range(2)] == expected
    v = zo.factors.v.clone()
    zo.guide.read()
    assert torch.equal(v, zo.factors.v)
