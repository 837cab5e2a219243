"""A disk that is full, at the start or on the way: training goes on, nothing that was saved is lost."""

import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from keyhole.checkpoint.journal import format as journal
from keyhole.errors import UserError
from keyhole.model.model import Model
from keyhole.training import display, saving, trackers
from keyhole.training import loop as trainer
from keyhole.training.display import Display
from keyhole.training.start import train
from tests.matrix import in_every_run
from tests.training.children import Child
from tests.training.runs import Make, losses, metrics, same, weights

pytestmark = pytest.mark.picture  # it is one of the files that a full disk does not take


def test_a_disk_without_room_is_refused_at_the_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, with both numbers."""
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
    assert "checkpoint-4 NOT saved" in out and "checkpoint-2 stays; trying again at step 6" in out
    assert "checkpoint-6 NOT saved" in out and "saved" in out.partition("step  7/12")[2]
    assert (Path(config.output_dir) / "checkpoint-12").is_dir()


def test_room_is_made_by_deleting_the_oldest_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two checkpoints only, the oldest goes before the third is written, never the newest."""
    config = make(save_steps=2)
    root = Path(config.output_dir)
    monkeypatch.setattr(saving, "free_bytes", lambda path: 0 if len(list(root.glob("checkpoint-*"))) > 1 else 2**40)
    assert train(config) == 0
    assert sorted(path.name for path in root.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


def no_growth_from_4_to_8() -> None:
    saving.RETRY_STEPS = 3
    real = trainer.Run.step

    def step(self: trainer.Run, number: int) -> None:
        if number in (4, 8):
            writing = self.saver.background and self.saver.background.writing
            if writing:  # beside training: it is to end under the limit that it began under
                writing.thread.join(20)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if number == 4 else -1, -1))
        real(self, number)

    trainer.Run.step = step


@in_every_run(lambda method, background: background == (method == "zo"))
@pytest.mark.parametrize(("method", "background"), [("zo", True), ("adamw", True), ("adamw", False)])
def test_files_that_cannot_grow_do_not_stop_training(make: Make, method: str, background: bool) -> None:
    """A real limit on file sizes during two saves: loud, the old checkpoint stays, a later save succeeds, same bits."""
    settings = {"method": method, "save_steps": 2, "max_steps": 12, "background_save": background}
    config, whole = make(**settings), make("whole", **settings)
    code, out = Child(config, no_growth_from_4_to_8, draws=True).end()
    assert code == 0, out
    assert "warning: checkpoint-4 NOT saved" in out and "File too large" in out and "checkpoint-2 stays" in out
    assert sorted(path.name for path in Path(config.output_dir).glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-12",
    ]
    assert not list(Path(config.output_dir).glob(".*"))
    train(whole)
    assert same(weights(whole.output_dir), weights(config.output_dir))


FILLED = (3, 77)  # steps: when the disk is full, the last page of the journal still takes up to 73 records


def full_from_3_to_77() -> None:
    """Fills the file system that the run writes to, to the last byte, and frees it again."""
    real = trainer.Run.step

    def step(self: trainer.Run, number: int) -> None:
        filler = self.directory.root.parent / "filler"
        if number == FILLED[0]:
            with filler.open("wb", buffering=0) as file:
                with suppress(OSError):
                    while file.write(bytes(2**20)):
                        pass
                with suppress(OSError):
                    while file.write(bytes(512)):
                        pass
        if number == FILLED[1]:
            filler.unlink()
        real(self, number)

    trainer.Run.step = step


def test_a_full_file_system_does_not_stop_training(make: Make, small_disk: Callable[[int], Path]) -> None:
    """Journal, metrics and checkpoints all fail for fifty steps: loud, the run goes on, and nothing is missing at its
    end."""
    settings = {"method": "zo", "max_steps": 80, "save_steps": 40, "logging_steps": 80}
    config, whole = make(output_dir=str(small_disk(80) / "out"), **settings), make("whole", **settings)
    code, out = Child(config, full_from_3_to_77, draws=True).end()
    assert code == 0, out
    assert "warning: the journal cannot be written" in out and "the journal is whole again" in out
    assert "warning: run/metrics.jsonl failed" in out and "run/metrics.jsonl is complete again" in out
    assert "warning: checkpoint-40 NOT saved" in out and (Path(config.output_dir) / "checkpoint-80").is_dir()
    train(whole)
    assert same(weights(whole.output_dir), weights(config.output_dir)) and metrics(whole) == metrics(config)
    ours, theirs = (journal.read(Path(each.output_dir) / "run" / "journal") for each in (config, whole))
    assert ours.records == theirs.records and ours.last == 80


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


def test_a_start_that_fails_closes_the_model(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the model was loaded and before the first step."""
    closed, real = [], Model.close
    monkeypatch.setattr(Model, "close", lambda self: (closed.append(self), real(self)))
    monkeypatch.setattr(saving, "free_bytes", lambda path: 0)
    with pytest.raises(UserError, match="output_dir"):
        train(make())
    assert len(closed) == 1


class BrokenTracker:
    def write(self, entry: dict) -> None:
        raise ValueError("the tracker is broken")

    def close(self) -> None:
        pass


def test_a_tracker_that_fails_is_said_once(make: Make, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The run goes on without it, and the metrics are complete."""
    monkeypatch.setattr(trackers, "open_tracker", lambda *about: BrokenTracker())
    config = make(max_steps=3, report_to="tensorboard")
    assert train(config) == 0
    out = capsys.readouterr().out
    assert out.count("the tracker is broken") == 1 and "report_to: tensorboard failed" in out
    assert len(losses(config)) == 3


def test_a_line_that_cannot_be_printed_ends_no_run(make: Make, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Whatever is wrong with how a step is shown, the step counts."""
    monkeypatch.setattr(display, "step_line", lambda entries, total: entries[0]["no such number"])
    assert train(make(max_steps=3)) == 0
    assert capsys.readouterr().out.count("the line of a step failed: KeyError: 'no such number'") == 1
