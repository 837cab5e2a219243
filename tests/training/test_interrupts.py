"""Signals to a real process, and two processes in one directory."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keyhole.errors import UserError
from keyhole.training.start import train
from tests.training.children import Child
from tests.training.runs import Make, losses, same, weights


def hear_all() -> None:
    """A background job may have signals ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_from_outside(make: Make, number: signal.Signals) -> None:
    """A real process finishes its step, saves, and exits with 130; what it saved can be gone on from."""
    config = make(max_steps=100_000, logging_steps=1000)
    child = Child(config, hear_all)
    try:
        child.wait_for(" 1/100000 ")
        os.kill(child.process.pid, number)
        code, out = child.end()
    finally:
        child.kill()
    assert code == 130, out
    done = len(losses(config))
    assert f"stopped by {number.name} after step {done}" in out and done < 100_000
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
    from keyhole.checkpoint.snapshot import background

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may have it ignored
    real = background.write_state

    def write(path: Path, about: Any, *rest: Any) -> None:
        real(path, about, *rest)
        if about.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)

    background.write_state = write


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


def test_two_processes_in_one_directory(make: Make) -> None:
    """The second one is refused with the number of the first, which goes on."""
    config = make(max_steps=100_000, logging_steps=1000)
    child = Child(config)
    try:
        child.wait_for(" 1/100000 ")
        with pytest.raises(UserError, match=f"process {child.process.pid} is training into"):
            train(config, resume="")
        assert child.process.is_alive()
    finally:
        child.kill()
