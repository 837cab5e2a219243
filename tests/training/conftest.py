"""Short runs: a config to change, and a signal in the middle of one."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keyhole.config import TrainConfig, resolve
from keyhole.training import loop as trainer
from keyhole.training.start import train
from tests.training.runs import Make, metrics, same, weights


@pytest.fixture
def make(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> Make:
    """Builds the config of a short run in tmp_path/<name>; keywords change it."""

    def build(name: str = "out", **changes: Any) -> TrainConfig:
        base = {"model": str(tiny_model), "train_data": str(tiny_data), "output_dir": str(tmp_path / name)}
        base |= {"method": "adamw", "learning_rate": 1e-3, "max_steps": 6, "batch_size": 4, "device": "cpu"}
        return resolve(TrainConfig(**base | {"lr_scheduler_type": "cosine", "warmup_ratio": 0.2} | changes))[0]

    return build


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Raises a signal inside the given step of the next run."""

    def arrange(step: int, number: int = signal.SIGINT) -> None:
        real, calls = trainer.Leader.step, []

        def once(self: trainer.Leader, current: int) -> None:
            if current == step and not calls:
                calls.append(current)
                signal.raise_signal(number)
            real(self, current)

        monkeypatch.setattr(trainer.Leader, "step", once)

    return arrange


@pytest.fixture
def stopped_is_whole(stop_after: Callable[[int], None]) -> Callable[[TrainConfig, TrainConfig, int], None]:
    """Runs the first config, and the second with a signal within a step and a resume: metrics and weights are equal."""

    def check(whole: TrainConfig, stopped: TrainConfig, step: int) -> None:
        assert train(whole) == 0
        stop_after(step)
        assert train(stopped) == 130
        assert (Path(stopped.output_dir) / f"checkpoint-{step}").is_dir()
        assert not (Path(stopped.output_dir) / "model.safetensors").exists()
        assert train(stopped, resume="") == 0
        assert metrics(whole) == metrics(stopped) and same(weights(whole.output_dir), weights(stopped.output_dir))

    return check
