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
        """As the docs show it: without a bound that nobody will meet."""
        return self.describe(full=False)

    def describe(self, full: bool = True) -> str:
        """`>= 1 and <= 4096`."""
        low = "" if self.low is None else f"{'> ' if self.above else '>= '}{_text(self.low)}"
        high = "" if self.high is None or (self.high == MOST and not full) else f"<= {_text(self.high)}"
        return " and ".join(part for part in (low, high) if part)


def _text(number: float) -> str:
    """`4096` and not `4.1e+03`."""
    return str(number) if isinstance(number, int) else f"{number:g}"


MOST = 10**9  # of anything that is counted: beyond it, a number is a slip of the keyboard
Count = Annotated[int, Limit(1, MOST)]
BatchSize = Annotated[int, Limit(1, 2**20)]
Rank = Annotated[int, Limit(1, 2**16)]  # of adapters; the model's matrices bound it further
Threads = Annotated[int, Limit(1, 1024)]
Seed = Annotated[int, Limit(0, 2**63 - 1)]
Positive = Annotated[float, Limit(0, above=True)]
NotNegative = Annotated[float, Limit(0)]
Fraction = Annotated[float, Limit(0, 1)]
BelowOne = Annotated[float, Limit(0, 0.999999)]

# What others call the dtypes; refused with our name for it
SPELLINGS = {
    "fp32": "float32", "float": "float32", "f32": "float32", "fp16": "float16", "half": "float16", "f16": "float16",
    "bf16": "bfloat16", "brain": "bfloat16",
}  # fmt: skip
