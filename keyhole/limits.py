"""Bounds of numbers, part of a setting's type: `Annotated[int, Limit(1)]`, with names for the usual ones."""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Limit:
    """Bounds of a number: low <= x <= high, or low < x where `above` is set."""

    low: float | None = None
    high: float | None = None
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value lies inside."""
        if self.low is not None and (value <= self.low if self.above else value < self.low):
            return False
        return self.high is None or value <= self.high

    def __str__(self) -> str:
        low = "" if self.low is None else f"{'> ' if self.above else '>= '}{self.low:g}"
        high = "" if self.high is None else f"<= {self.high:g}"
        return " and ".join(part for part in (low, high) if part)


Count = Annotated[int, Limit(1)]
Seed = Annotated[int, Limit(0, 2**63 - 1)]
Positive = Annotated[float, Limit(0, above=True)]
NotNegative = Annotated[float, Limit(0)]
Fraction = Annotated[float, Limit(0, 1)]
BelowOne = Annotated[float, Limit(0, 0.999999)]
