"""Copies to the host that have not finished are bounded in bytes."""

from keyhole.offload.downlink import InFlight


class Event:
    """Records that the host waited for it."""

    def __init__(self, number: int, waited: list[int]) -> None:
        self.number, self.waited = number, waited

    def synchronize(self) -> None:
        self.waited.append(self.number)


def test_the_host_waits_for_the_oldest_copies_and_for_no_more_than_needed() -> None:
    """Never more bytes than allowed, unless a single copy is larger; the oldest first, and the newest never."""
    waited: list[int] = []
    flight = InFlight(100)
    for number, size in enumerate((60, 40, 30, 150, 10, 90)):
        flight.add(size, Event(number, waited))
        assert flight.bytes <= 100 or len(flight.copies) == 1
        assert flight.bytes == sum(size for size, _ in flight.copies)
    assert waited == [0, 1, 2, 3]
    assert [event.number for _, event in flight.copies] == [4, 5]
