"""Copies to the host that have not finished are bounded in bytes."""

import torch

from keyhole.offload.downlink import Downlink
from keyhole.offload.engine import Engine


class Event:
    """Records that the host waited for it."""

    def __init__(self, number: int, waited: list[int]) -> None:
        self.number, self.waited = number, waited

    def synchronize(self) -> None:
        self.waited.append(self.number)


def test_the_host_waits_for_the_oldest_copies_and_for_no_more_than_needed() -> None:
    waited: list[int] = []
    down = Downlink(Engine([], set(), torch.device("cpu")), most_bytes=100)
    for number, size in enumerate((60, 40, 30, 150, 10, 90)):
        down.wait_for_room(size, Event(number, waited))
        assert sum(size for size, _ in down.in_flight) <= 100 or len(down.in_flight) == 1
    assert waited == [0, 1, 2, 3]
    assert [event.number for _, event in down.in_flight] == [4, 5]
