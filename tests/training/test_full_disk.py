"""A disk that is full, at the start or on the way: training goes on, nothing that was saved is lost."""

import resource
from pathlib import Path

import pytest

from keyhole.checkpoint.journal import format as journal
from keyhole.errors import UserError
from keyhole.training import loop as trainer
from keyhole.training import saving
from keyhole.training.start import train
from tests.training.children import Child
from tests.training.runs import Make, losses, same, weights


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
    config = make(save_steps=2, max_steps=20)
    monkeypatch.setattr(saving, "RETRY_STEPS", 3)
    real = saving.free_bytes

    def free(path: Path) -> int:
        return 0 if (Path(config.output_dir) / "checkpoint-2").exists() and len(losses(config)) < 7 else real(path)

    monkeypatch.setattr(saving, "free_bytes", free)
    assert train(config) == 0
    out = capsys.readouterr().out
    assert "checkpoint-4 NOT saved (output_dir: a checkpoint takes 0.06 GiB" in out
    assert "checkpoint-2 stays; trying again at step 7" in out and "saved" in out.partition("step  7/20")[2]
    assert (Path(config.output_dir) / "checkpoint-20").is_dir()


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


@pytest.mark.parametrize(("method", "background"), [("zo", True), ("adamw", True), ("adamw", False)])
def test_files_that_cannot_grow_do_not_stop_training(make: Make, method: str, background: bool) -> None:
    """A real limit on file sizes during two saves: loud, the old checkpoint stays, a later save succeeds, same bits."""
    settings = {"method": method, "save_steps": 2, "max_steps": 12, "background_save": background}
    config, whole = make(**settings), make("whole", **settings)
    code, out = Child(config, no_growth_from_4_to_8).end()
    assert code == 0, out
    assert "warning: checkpoint-4 NOT saved" in out and "File too large" in out and "checkpoint-2 stays" in out
    assert sorted(path.name for path in Path(config.output_dir).glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-12",
    ]
    assert not list(Path(config.output_dir).glob(".*"))
    train(whole)
    assert same(weights(whole.output_dir), weights(config.output_dir))


def no_growth_of_the_journal_from_3_to_6() -> None:
    real = trainer.Run.step

    def step(self: trainer.Run, number: int) -> None:
        if number in (3, 6):
            size = self.directory.journal.stat().st_size + 10 if number == 3 else -1
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))
        real(self, number)

    trainer.Run.step = step
    trainer.MetricsFile.write = lambda self, entry: None


def test_a_journal_that_cannot_be_written_does_not_stop_training(make: Make) -> None:
    """Records wait in memory until the file may grow again; none is missing at the end."""
    config = make(method="zo", max_steps=8)
    code, out = Child(config, no_growth_of_the_journal_from_3_to_6).end()
    assert code == 0, out
    assert "warning: the journal cannot be written" in out and "whole again, up to step 6" in out
    found = journal.read(Path(config.output_dir) / "run" / "journal")
    assert found.last == 8 and found.fault is None
