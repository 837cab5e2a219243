"""Settings that may and may not change within a run."""

from dataclasses import replace
from typing import Any

import pytest

from keyhole.checkpoint.state import State
from keyhole.config import Bytes, TrainConfig
from keyhole.config.fields import settings
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
    lines = apply_changes(state(), replace(CONFIG, max_steps=20, learning_rate=1e-7))
    assert lines == ["learning_rate: 1e-06 -> 1e-07, from step 5 on", "max_steps: 9 -> 20, from step 5 on"]


def test_unsafe_changes_are_refused_all_at_once() -> None:
    changed = replace(CONFIG, seed=1, train_on="all", zo=ZOConfig(eps=0.1), max_steps=20)
    for key, value in (("method", "adamw"), ("model", "gone")):
        with pytest.raises(
            UserError, match=f"  {key}: the run has {getattr(CONFIG, key)}, the config now says {value}"
        ):
            apply_changes(state(), replace(CONFIG, **{key: value}))
    with pytest.raises(UserError) as error:
        apply_changes(state(), changed)
    message = str(error.value)
    assert all(key in message for key in ("  seed: the run has 0", "  train_on:", "  zo.eps:"))
    assert "max_steps" not in message


def test_safe_keys_exist() -> None:
    """A renamed setting must not leave a dead name in the list."""
    assert SAFE <= settings().keys()
