"""A disk that is full, at the start or on the way: training goes on, nothing that was saved is lost."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from keyhole.checkpoint import journal
from keyhole.errors import UserError
from keyhole.model.model import Model
from keyhole.training import loop as trainer
from keyhole.training import saving, trackers
from keyhole.training.display import Display
from keyhole.training.start import train
from tests.matrix import in_every_run
from tests.training.children import Child
from tests.training.runs import Make, losses, metrics, same, weights


def test_a_disk_without_room_is_refused_at_the_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "free_bytes", lambda path: 2**20)
    with pytest.raises(UserError, match=r"output_dir: saving the model takes 0\.06 GiB, and .* has 0\.00 GiB free"):
        train(make())
    assert not Path(make().output_dir).exists()


def test_a_disk_that_fills_up_does_not_stop_training(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A save without room is skipped aloud and tried again; the old checkpoint stays; the end is saved."""
    config = make(save_steps=2, max_steps=12)
    monkeypatch.setattr(saving, "RETRY_STEPS", 3)
    real = saving.free_bytes

    def free(path: Path) -> int:
        return 0 if (Path(config.output_dir) / "checkpoint-2").exists() and len(losses(config)) < 7 else real(path)

    monkeypatch.setattr(saving, "free_bytes", free)
    assert train(config) == 0
    out = capsys.readouterr().out
    assert "checkpoint-4 NOT saved (output_dir: a checkpoint takes 0.06 GiB" in out
    assert "checkpoint-4 NOT saved" in out and "checkpoint-2 stays; trying again by step 7" in out
    assert "checkpoint-6 NOT saved" in out and "saved" in out.partition("step  7/12")[2]
    assert (Path(config.output_dir) / "checkpoint-12").is_dir()


def test_room_is_made_by_deleting_the_oldest_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two checkpoints only, the oldest goes before the third is written, never the newest."""
    config = make(save_steps=2)
    root = Path(config.output_dir)
    monkeypatch.setattr(saving, "free_bytes", lambda path: 0 if len(list(root.glob("checkpoint-*"))) > 1 else 2**40)
    assert train(config) == 0
    assert sorted(path.name for path in root.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


FILLED = (3, 77)  # steps: when the disk is full, the last page of the journal still takes up to 73 records


def fill(folder: Path) -> None:
    """Fills a file system to the last byte."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (2**20, 512):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


def full_from_3_to_77() -> None:
    """Fills the file system that the run writes to, and frees it again."""
    real = trainer.Leader.step

    def step(self: trainer.Leader, number: int) -> None:
        folder = self.run.directory.root.parent
        if number == FILLED[0]:
            fill(folder)
        if number == FILLED[1]:
            (folder / "filler").unlink()
        real(self, number)

    trainer.Leader.step = step


def full_and_nothing_reserved() -> None:
    journal.AHEAD_BYTES = 0
    full_from_3_to_77()


@in_every_run(lambda arrange: arrange is full_and_nothing_reserved)
@pytest.mark.parametrize("arrange", [full_from_3_to_77, full_and_nothing_reserved])
def test_a_full_file_system_does_not_stop_training(
    make: Make, small_disk: Callable[[int], Path], arrange: Callable[[], None]
) -> None:
    """Checkpoints and metrics fail for fifty steps, and without reserved space the journal, too: loud, the run goes on,
    and nothing is missing at its end."""
    settings = {"method": "zo", "max_steps": 80, "save_steps": 40, "logging_steps": 80}
    config, whole = make(output_dir=str(small_disk(80) / "out"), **settings), make("whole", **settings)
    code, out = Child(config, arrange).end()
    assert code == 0, out
    fails = arrange is full_and_nothing_reserved
    assert ("warning: the journal cannot be written" in out) == ("the journal is whole again" in out) == fails
    assert "run/metrics.jsonl failed" in out and "run/metrics.jsonl is complete again" in out
    assert "warning: checkpoint-40 NOT saved" in out and (Path(config.output_dir) / "checkpoint-80").is_dir()
    train(whole)
    assert same(weights(whole.output_dir), weights(config.output_dir)) and metrics(whole) == metrics(config)
    ours, theirs = (journal.read(Path(each.output_dir) / "run" / "journal") for each in (config, whole))
    assert ours.records == theirs.records and ours.last == 80


def full_for_good() -> None:
    """Nobody frees any space after step 3."""
    saving.WAIT_S = 0.0
    real = trainer.Leader.step

    def step(self: trainer.Leader, number: int) -> None:
        if number == 4:
            fill(self.run.directory.root.parent)
        real(self, number)

    trainer.Leader.step = step


@pytest.mark.parametrize(("method", "save_steps"), [("zo", None), ("zo", 2), ("adamw", 2)])
def test_a_run_that_ends_on_a_full_disk_says_what_is_left(
    make: Make, small_disk: Callable[[int], Path], method: str, save_steps: int | None
) -> None:
    """The run fails, and its message is true: with a journal the resumed run loses no step, others only those after the
    checkpoint it names; the result is that of an undisturbed run."""
    settings = {"method": method, "max_steps": 7, "save_steps": save_steps, "background_save": False}
    config, whole = make(output_dir=str(small_disk(80) / "out"), **settings), make("whole", **settings)
    root = Path(config.output_dir)
    code, out = Child(config, full_for_good).end()
    assert code != 0 and "UserError" in out, out
    told = f"all 7 steps are in {root / 'run' / 'journal'}: --resume replays them, and nothing is lost"
    told = told if method == "zo" else "the steps after checkpoint-2 are lost, and --resume goes on from there"
    assert told in out and "0.00 GiB free" in out
    (root.parent / "filler").unlink()
    assert train(config, resume="") == 0 and train(whole) == 0
    assert same(weights(whole.output_dir), weights(root)) and metrics(whole) == metrics(config)


def test_the_last_save_waits_for_room(
    make: Make, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Somebody frees some while the weights are in memory: the run ends as if nothing had happened."""
    config = make(output_dir=str(small_disk(80) / "out"), method="adamw", max_steps=3)
    root, real, pauses = Path(config.output_dir), saving.Saver.save_last, []

    def full(self: saving.Saver) -> Path:
        fill(root.parent)
        return real(self)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            (root.parent / "filler").unlink()

    monkeypatch.setattr(saving.Saver, "save_last", full)
    monkeypatch.setattr(saving.time, "sleep", pause)
    assert train(config) == 0 and len(pauses) == 3
    out = capsys.readouterr().out
    assert out.count("the last checkpoint is NOT saved") == 1 and "the save goes on by itself when there is room" in out
    assert (root / "checkpoint-3").is_dir() and (root / "model.safetensors").is_file()


def test_a_signal_ends_the_wait_for_room(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives up; without a journal and a checkpoint the message says that all is lost."""
    config = make(method="adamw", max_steps=2)
    real, asked = saving.Saver.save_last, []

    def full(self: saving.Saver) -> Path:
        monkeypatch.setattr(saving, "free_bytes", lambda path: 0)
        monkeypatch.setattr(saving.time, "sleep", lambda seconds: asked.append(self.run.interrupts.ask("SIGINT")))
        return real(self)

    monkeypatch.setattr(saving.Saver, "save_last", full)
    with pytest.raises(UserError, match="once there is room: there is no checkpoint, so all steps are lost"):
        train(config)
    assert len(asked) == 1


def test_what_fails_while_closing_leaves_nothing_open(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of a run is closed, whatever the others raise; the directory is free and the model's memory too."""
    closed, real = [], Model.close

    def broken(self: object) -> None:
        closed.append(type(self).__name__)
        raise RuntimeError("it cannot be closed")

    monkeypatch.setattr(saving.Saver, "close", broken)
    monkeypatch.setattr(Display, "close", broken)
    monkeypatch.setattr(Model, "close", lambda self: (closed.append("Model"), real(self)))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(RuntimeError, match="it cannot be closed"):
        train(make(method="zo", max_steps=2))
    assert closed == ["Display", "Saver", "Model"]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert "keyhole-journal" not in [thread.name for thread in threading.enumerate()]


def test_a_tracker_that_fails_is_said_once(make: Make, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:

    def broken(step: int, numbers: dict[str, float]) -> None:
        raise ValueError("the tracker is broken")

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", lambda about: (broken, lambda: None))
    config = make(max_steps=3, report_to="tensorboard")
    assert train(config) == 0
    out = capsys.readouterr().out
    assert out.count("the tracker is broken") == 1 and "report_to: tensorboard failed" in out
    assert len(losses(config)) == 3
