"""The share of a sweep that the GPU waited, from events that pass when the test says so."""

import pytest
import torch

from keyhole.offload.stalls import FIRST, NTH, Stalls


class Clock:
    """Stands for the GPU: events take its time when they are recorded, and are passed when it says so."""

    now_ms, passed_ms = 0.0, 0.0


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at_ms = float("inf")

    def record(self, stream: object) -> None:
        self.at_ms = Clock.now_ms

    def query(self) -> bool:
        return self.at_ms <= Clock.passed_ms

    def elapsed_time(self, other: "Event") -> float:
        return other.at_ms - self.at_ms


@pytest.fixture
def stalls(monkeypatch: pytest.MonkeyPatch) -> Stalls:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Clock.now_ms = Clock.passed_ms = 0.0
    return Stalls("train")


def sweep(stalls: Stalls, waits_ms: list[float], name: str = "train") -> None:
    stalls.begin(name)
    for wait_ms in waits_ms:
        stalls.mark(None)
        Clock.now_ms += wait_ms
        stalls.mark(None)
        Clock.now_ms += 10.0


def test_a_share_is_the_waits_over_the_whole(stalls: Stalls) -> None:
    sweep(stalls, [5.0, 0.0, 10.0])
    assert stalls.take() is None
    Clock.passed_ms = Clock.now_ms
    assert stalls.take() == pytest.approx(15 / 35) and stalls.take() is None


def test_sweeps_are_told_in_order_and_apart(stalls: Stalls) -> None:
    sweep(stalls, [])
    sweep(stalls, [10.0, 10.0])
    Clock.passed_ms = Clock.now_ms
    sweep(stalls, [0.0, 0.0])
    assert stalls.take() == pytest.approx(20 / 30) and stalls.take() is None
    sweep(stalls, [100.0] * 50, "generate")
    Clock.passed_ms = Clock.now_ms
    assert stalls.take() == 0.0 and stalls.sweeps == []


def test_later_sweeps_are_sampled(stalls: Stalls) -> None:
    measured = []
    for i in range(3 * NTH):
        sweep(stalls, [1.0, 1.0])
        Clock.passed_ms = Clock.now_ms
        measured += [i] if stalls.take() is not None else []
    assert measured == [*range(FIRST), NTH, 2 * NTH]
