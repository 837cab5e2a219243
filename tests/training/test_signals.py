"""Interrupts."""

import signal
from pathlib import Path

import pytest

from keyhole.training import signals
from keyhole.training.signals import Interrupts


def caught(number: int) -> bool:
    """Whether the system hands a signal to this process rather than end it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_next_is_the_systems(number: int, capfd: pytest.CaptureFixture) -> None:
    """One signal sets the flag and, after the grace, frees both; leaving the context puts the old handlers back."""
    before, heard = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}, caught(signal.SIGINT)
    with Interrupts() as interrupts:
        assert interrupts.requested is None
        signal.raise_signal(number)
        assert interrupts.requested == signal.Signals(number).name
        interrupts._grace.join()
        assert not caught(signal.SIGINT) and not caught(signal.SIGTERM)
    assert {each: signal.getsignal(each) for each in before} == before and caught(signal.SIGINT) == heard
    assert "finishing this step" in capfd.readouterr().err


def test_a_storm_of_signals_is_one_request(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """A closed terminal or a launcher sends several at once: the run saves, rather than die of the second."""
    monkeypatch.setattr(signals, "GRACE_S", 3600.0)  # however slow this machine is
    with Interrupts() as interrupts:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP) * 5:
            signal.raise_signal(number)
        assert interrupts.requested == "SIGTERM" and caught(signal.SIGINT)
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
