"""Signals, alone and to a real process, and two processes in one directory."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import keyhole.cli
from keyhole.checkpoint import journal
from keyhole.config import TrainConfig
from keyhole.errors import UserError
from keyhole.training import loop as trainer
from keyhole.training import saving, signals
from keyhole.training.run import END_OF_TORCHRUN, ORPHANED, Command, Run
from keyhole.training.signals import Interrupts
from keyhole.training.start import train
from tests.matrix import in_every_run
from tests.training.children import Child
from tests.training.runs import Make, losses, same, weights


@pytest.mark.parametrize(
    ("orphaned", "number", "asked"),
    [
        (True, 0, [END_OF_TORCHRUN]),
        (False, ORPHANED, [f"{END_OF_TORCHRUN} on rank 1"]),
        (False, 15, ["SIGTERM on rank 1"]),
        (False, 0, []),
    ],
)
def test_the_end_of_torchrun_is_a_signal(orphaned: bool, number: int, asked: list[str]) -> None:
    """The leader asks its run to stop when it or another rank is an orphan, or has got a signal."""
    heard: list[str] = []
    ranks = SimpleNamespace(several=True, orphaned=orphaned, gather=lambda x: torch.tensor([[1, 2, 0], [1, 2, number]]))
    run: Any = SimpleNamespace(model=SimpleNamespace(ranks=ranks), interrupts=SimpleNamespace(ask=heard.append))
    Run.call(run, next(iter(Command)))
    assert heard == asked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_next_is_the_systems(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One signal sets the flag; one after the grace ends the process; leaving the context puts the old handlers
    back."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    ended: list[int] = []
    monkeypatch.setattr(signals.os, "kill", lambda process, which: ended.append(which))
    with Interrupts() as interrupts:
        assert interrupts.requested is None
        signal.raise_signal(number)
        assert interrupts.requested == signal.Signals(number).name and not ended
        monkeypatch.setattr(signals, "GRACE_S", -1.0)
        signal.raise_signal(number)
        assert ended == [number] and signal.getsignal(number) == signal.SIG_DFL
    assert {each: signal.getsignal(each) for each in before} == before


def test_a_storm_of_signals_is_one_request(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """A closed terminal or a launcher sends several at once: the run saves, rather than die of the second."""
    monkeypatch.setattr(signals, "GRACE_S", 3600.0)  # however slow this machine is
    with Interrupts() as interrupts:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP) * 5:
            signal.raise_signal(number)
        assert interrupts.requested == "SIGTERM"
    assert capfd.readouterr().err.count("finishing this step") == 1


def test_a_hang_up_is_heard_unless_it_is_ignored() -> None:
    """`nohup` ignores it, and then it stays so."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, handler)
            with Interrupts() as interrupts:
                heard = signal.getsignal(signal.SIGHUP) not in (signal.SIG_IGN, signal.SIG_DFL)
            assert heard == (handler == signal.SIG_DFL) and signal.getsignal(signal.SIGHUP) == handler
            assert interrupts.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


def hear_all() -> None:
    """A background job may have signals ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def stopped(config: TrainConfig, prepare: Callable[[], None], *numbers: signal.Signals) -> tuple[str, int]:
    """What a real process of 100,000 steps says that gets these signals after its first, and how many steps it did."""
    child = Child(config, prepare)
    try:
        child.wait_for(" 1/100000 ")
        for number in numbers:
            os.kill(child.process.pid, number)
        code, out = child.end()
    finally:
        child.kill()
    done = len(losses(config))
    assert code == 130 and done < 100_000, out
    return out, done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_from_outside(make: Make, number: signal.Signals) -> None:
    """A real process finishes its step, saves, and exits with 130; what it saved can be gone on from."""
    config = make(max_steps=100_000, logging_steps=1000)
    out, done = stopped(config, hear_all, number)
    assert f"stopped by {number.name} after step {done}" in out
    assert train(replace(config, max_steps=done + 1), resume="") == 0
    assert len(losses(config)) == done + 1


def test_nobody_listens_any_more(make: Make) -> None:
    """The other end of the output is closed: the step is finished, a checkpoint saved, and the exit code 130."""
    config = make(max_steps=100_000, logging_steps=1)
    child = Child(config)
    child.wait_for(" 2/100000 ")
    child.out.close()
    child.process.join()
    child.limit.cancel()
    assert child.process.exitcode == 130
    done = len(losses(config))
    assert (Path(config.output_dir) / f"checkpoint-{done}").is_dir() and done < 100_000


def interrupt_the_save_twice() -> None:
    from keyhole.checkpoint import writer

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may have it ignored
    real = writer.write_state

    def write(path: Path, about: Any, *rest: Any) -> None:
        real(path, about, *rest)
        if about.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)  # the process dies meanwhile: its main thread hears the signal

    writer.write_state = write


def test_a_second_signal_during_the_save_harms_nothing(make: Make) -> None:
    """The process dies at once; the checkpoint before is whole, and the half-written one is swept away."""
    config = make(save_steps=2)
    code, out = Child(config, interrupt_the_save_twice).end()
    assert code == -signal.SIGINT, out
    root = Path(config.output_dir)
    assert list(root.glob(".checkpoint-4.saving-*")) and not (root / "checkpoint-4").exists()
    assert train(config, resume="") == 0
    whole = make("whole")
    train(whole)
    assert same(weights(whole.output_dir), weights(root)) and not list(root.glob(".*"))


def read_only_from_4() -> None:
    """As a user without rights over the directory from step 4 on."""
    hear_all()
    real = trainer.Leader.step

    def step(self: trainer.Leader, number: int) -> None:
        if number == 4:
            writing = self.saver.writer.writing
            if writing:  # beside training: it is to end with the rights that it began with
                writing.thread.join()
            os.chmod(self.run.directory.root, 0o555)
            os.chown(self.run.directory.root, 0, 0)
            os.seteuid(65534)
        real(self, number)

    saving.RETRY_STEPS = 2
    trainer.Leader.step = step


@pytest.mark.skipif(os.getuid() != 0, reason="takes rights away from itself")
@in_every_run(lambda background: background)
@pytest.mark.parametrize("background", [True, False])
def test_a_directory_that_turns_read_only_stops_no_training(make: Make, background: bool) -> None:
    """Every save fails and is said; the last one is the user's to fix, and the journal goes on from where it is."""
    config = make(method="zo", max_steps=8, save_steps=2, background_save=background)
    code, out = Child(config, read_only_from_4).end()
    root = Path(config.output_dir)
    assert code == 1 and "UserError: output_dir" in out and "Permission denied" in out
    assert "warning: checkpoint-4 NOT saved" in out and "step 8/8" in out
    assert [path.name for path in root.iterdir() if path.name.startswith("checkpoint")] == ["checkpoint-2"]
    os.chmod(root, 0o755)
    assert train(config, resume="") == 0
    whole = make("whole", method="zo", max_steps=8)
    train(whole)
    assert same(weights(whole.output_dir), weights(root)) and len(losses(config)) == 8


def no_streams() -> None:
    for number in (0, 1, 2):
        os.close(number)
    keyhole.cli._open_streams()


def test_a_run_without_input_and_output_trains(make: Make) -> None:
    """Standard streams that are closed from the start: no file of the run takes their place."""
    config, whole = make(method="zo"), make("whole", method="zo")
    child = Child(config, no_streams)
    assert child.end()[0] == 0
    train(whole)
    assert same(weights(whole.output_dir), weights(config.output_dir)) and len(losses(config)) == 6
    assert journal.read(Path(config.output_dir) / "run" / "journal").fault is None


def test_two_processes_in_one_directory(make: Make) -> None:
    config = make(max_steps=100_000, logging_steps=1000)
    child = Child(config)
    try:
        child.wait_for(" 1/100000 ")
        with pytest.raises(UserError, match=f"process {child.process.pid} is training into"):
            train(config, resume="")
        assert child.process.is_alive()
    finally:
        child.kill()
