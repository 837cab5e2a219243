"""The split of a run's micro-batches is the same after a resume."""

from dataclasses import replace as changed
from pathlib import Path

import pytest
from safetensors.torch import load_file

from keyhole.checkpoint.state import read_state
from keyhole.config import TrainConfig, resolve
from keyhole.training.start import train


def config(model: Path, data: Path, out: Path, **settings: object) -> TrainConfig:
    common = {"method": "lomo", "placement": "stream", "gpu_memory": "800KiB", "batch_size": 24, "max_steps": 2}
    common |= {"model": str(model), "train_data": str(data), "output_dir": str(out), "device": "cpu"}
    return resolve(TrainConfig(**common | {"learning_rate": 1e-3, "lr_scheduler_type": "constant"} | settings))[0]


def test_another_budget_keeps_the_split_and_another_split_is_said(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """To the bit with more memory, where fewer passes would fit; with another number of rows, a line says so."""
    whole, stopped = (config(tiny_model, tiny_data, tmp_path / name) for name in ("whole", "stopped"))
    assert train(changed(whole, max_steps=4)) == 0 and train(stopped) == 0
    then = read_state(tmp_path / "stopped" / "checkpoint-2").pass_tokens
    assert then is not None and "passes each block in" in capsys.readouterr().out
    assert train(changed(stopped, max_steps=4, gpu_memory="64MiB"), resume="") == 0
    assert "resume: passes" not in capsys.readouterr().out
    assert read_state(tmp_path / "stopped" / "checkpoint-4").pass_tokens == then
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("stopped", "whole"))
    assert all((mine[name] == theirs[name]).all() for name in theirs)
    assert train(changed(stopped, max_steps=5, micro_batch_size=8, gpu_memory="64MiB"), resume="") == 0
    assert f"resume: passes were of at most {then:,} tokens, and are of at most" in capsys.readouterr().out
