"""A run whose output directory is deleted, moved or taken by others while it trains: said, and nothing is lost."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from keyhole.errors import UserError
from keyhole.training import loop, saving
from keyhole.training.rundir import RunDir
from keyhole.training.start import train
from tests.training.runs import Make, losses, same, weights


@pytest.fixture
def after_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Something happens to the directory after a step, when no save is under way."""

    def arrange(number: int, happens: Callable[[], None]) -> None:
        real = loop.Run.after_step

        def after(self: loop.Run, step: int) -> None:
            real(self, step)
            if step == number:
                self.saver.wait(step)
                happens()

        monkeypatch.setattr(loop.Run, "after_step", after)

    return arrange


def test_a_deleted_directory_is_made_again(make: Make, after_step: Callable, capsys: pytest.CaptureFixture) -> None:
    """The model is saved, the loss of the metrics is said, and the new directory can be resumed."""
    config = make(save_steps=2)
    root = Path(config.output_dir)
    after_step(3, lambda: shutil.rmtree(root))
    assert train(config) == 0
    assert f"{root}/run, or a file in it, was deleted, moved or unmounted" in capsys.readouterr().out
    assert train(config, resume="") == 0
    assert same(weights(root), weights(root / "checkpoint-6"))


def test_deleted_metrics_are_said_once(make: Make, after_step: Callable, capsys: pytest.CaptureFixture) -> None:
    """The open file goes on without a name: its lines are lost."""
    config = make(save_steps=2)
    after_step(3, (Path(config.output_dir) / "run" / "metrics.jsonl").unlink)
    assert train(config) == 0
    assert capsys.readouterr().out.count("or a file in it, was deleted") == 1


def test_a_moved_directory_keeps_its_journal(make: Make, after_step: Callable) -> None:
    """zo: all steps are where the directory was moved to, and in the new one is the model."""
    config = make(method="zo", save_steps=2)
    root, moved = Path(config.output_dir), Path(f"{config.output_dir}-moved")
    after_step(3, lambda: os.rename(root, moved))
    assert train(config) == 0
    there = make(moved.name, method="zo", save_steps=2)
    assert there.output_dir == str(moved) and train(there, resume="") == 0
    assert same(weights(moved), weights(root)) and len(losses(there)) == 6


def test_a_directory_that_another_run_has_taken_is_refused(make: Make, after_step: Callable) -> None:
    """Two runs are never mixed: the saves of the first fail, and say why."""
    config, other = make(save_steps=2), make("other", max_steps=1)
    assert train(other) == 0
    root = Path(config.output_dir)

    def taken() -> None:
        shutil.rmtree(root)
        shutil.copytree(other.output_dir, root)

    after_step(3, taken)
    with pytest.raises(UserError, match="another run has begun in"):
        train(config)
    assert RunDir(root).run_id == RunDir(Path(other.output_dir)).run_id
    assert same(weights(root), weights(other.output_dir))


def test_a_checkpoint_that_is_deleted_while_it_is_published(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The weights are in memory: the model is made of them. It was published without weights, in silence."""
    config, kept = make(), {}
    real = saving.hf.publish

    def publish(source: Path, *about: object) -> None:
        kept.update(weights(source))
        (source / "model.safetensors").unlink()
        real(source, *about)

    monkeypatch.setattr(saving.hf, "publish", publish)
    assert train(config) == 0
    assert "the model is saved from memory" in capsys.readouterr().out
    assert same(weights(config.output_dir), kept)
