"""Settings that may and may not change within a run."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keyhole.checkpoint.state import State
from keyhole.config import Bytes, TrainConfig
from keyhole.config.fields import settings
from keyhole.disk.weight_files import content_hash
from keyhole.errors import UserError
from keyhole.methods.zo.traits import ZOConfig
from keyhole.training.start import SAFE, apply_changes, flat_config

CONFIG = TrainConfig(
    model="m", method="zo", train_data=["a", "b"], output_dir="out", max_steps=9, learning_rate=1e-6,
    gpu_memory=Bytes(2**33),
)  # fmt: skip


def state(config: TrainConfig = CONFIG, **changes: Any) -> State:
    return State(4, config=flat_config(config) | changes)


def test_nothing_changed() -> None:
    """The same config gives no lines; sections of other methods do not count."""
    assert apply_changes(state(), CONFIG) == []
    assert apply_changes(state(), replace(CONFIG, adamw=replace(CONFIG.adamw, beta1=0.5))) == []


def test_safe_changes_are_applied_and_said() -> None:
    """A longer run with another rate: one line each, with both values."""
    lines = apply_changes(state(), replace(CONFIG, max_steps=20, learning_rate=1e-7))
    assert lines == ["learning_rate: 1e-06 -> 1e-07, from step 5 on", "max_steps: 9 -> 20, from step 5 on"]


def test_unsafe_changes_are_refused_all_at_once() -> None:
    """Every key that may not change is named."""
    changed = replace(CONFIG, seed=1, train_on="all", zo=ZOConfig(eps=0.1), max_steps=20)
    with pytest.raises(UserError) as error:
        apply_changes(state(), changed)
    message = str(error.value)
    assert all(key in message for key in ("  seed: the run has 0", "  train_on:", "  zo.eps:"))
    assert "max_steps" not in message


def test_a_moved_model_is_known_by_its_content(tiny_model: Path, tmp_path: Path) -> None:
    """The same weights at another place are the same model; others are not, nor is one whose hash is not known."""
    moved, other = shutil.copytree(tiny_model, tmp_path / "moved"), shutil.copytree(tiny_model, tmp_path / "other")
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(content)
    base, old = content_hash(tiny_model), state(model=str(tiny_model), train_data=["data/a", "data/b"])
    lines = apply_changes(old, replace(CONFIG, model=str(moved)), base=base)
    assert lines == [
        f"model: {tiny_model} -> {moved}, of the same content",
        'train_data: ["data/a", "data/b"] -> ["a", "b"], of the same content',
    ]
    for model, known in ((other, base), (moved, None)):
        with pytest.raises(UserError, match="  model: the run has"):
            apply_changes(old, replace(CONFIG, model=str(model)), base=known)


def test_another_method_is_refused() -> None:
    """The state of one method means nothing to another."""
    with pytest.raises(UserError, match="  method: the run has zo, the config now says adamw"):
        apply_changes(state(), replace(CONFIG, method="adamw"))


def test_safe_keys_exist() -> None:
    """A renamed setting must not leave a dead name in the list."""
    assert SAFE <= settings().keys()
