"""Interrupts."""

import signal
import threading

import pytest

from keyhole.training.signals import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_next_is_the_systems(number: int, capfd: pytest.CaptureFixture) -> None:
    """One signal sets the flag and frees both; leaving the context puts the old handlers back."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with Interrupts() as interrupts:
        assert interrupts.requested is None
        signal.raise_signal(number)
        assert interrupts.requested == signal.Signals(number).name
        assert {signal.getsignal(each) for each in before} == {signal.SIG_DFL}
    assert {each: signal.getsignal(each) for each in before} == before
    assert "finishing this step" in capfd.readouterr().err


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


def test_does_nothing_in_other_threads() -> None:
    """Only the main thread may set handlers; elsewhere a run goes on without them."""
    seen = []

    def work() -> None:
        with Interrupts() as interrupts:
            seen.append(interrupts.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
