"""Sizes of memory: an int of bytes that is parsed and printed with its unit ("8GiB").

    KiB MiB GiB TiB = 2^10 2^20 2^30 2^40        KB MB GB TB = 10^3 10^6 10^9 10^12        B = 1

keyhole prints GiB everywhere; GB is accepted because data sheets and link rates use it. A bare number or "8G" is
refused: one would mean eight bytes and the other could mean either unit, and a wrong guess would be off by 7 %. An int
is a count of bytes, and is refused below 1 MiB: a caller who writes gpu_memory=8 means something else.
str() is exact, so that a config survives a round trip: it gives the shortest text with at most two decimals ("8GB",
"0.04GiB"). `about` is for messages: the same if it is short, else three digits ("13.7GiB"). `enough` is for limits in
messages: rounded up, so that the number can be copied into a config.
"""

import re

MIB, GIB = 2**20, 2**30
UNITS: dict[str, int] = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_BY_LOWER = {unit.lower(): count for unit, count in UNITS.items()}
_PATTERN = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]+)")
EXPECTED = "a size with its unit, such as 8GiB or 800MiB"
LEAST_INT = 2**20
SHORT = len("1234MiB")


def _count(text: str) -> int:
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match[2].lower() not in _BY_LOWER:
        raise ValueError(EXPECTED)
    number = float(match[1]) if "." in match[1] else int(match[1])
    return round(number * _BY_LOWER[match[2].lower()])


class Bytes(int):
    """A number of bytes; `Bytes.parse("8GiB") == 8 * 2**30` and `str(Bytes(2**33)) == "8GiB"`."""

    @classmethod
    def parse(cls, text: "str | int") -> "Bytes":
        """Parses a size; a large int is a number of bytes. ValueError names what was expected."""
        is_count = isinstance(text, Bytes) or (type(text) is int and text >= LEAST_INT)
        count = int(text) if is_count else _count(str(text))
        if count < 1:
            raise ValueError(EXPECTED)
        return cls(count)

    def __str__(self) -> str:
        numbers = {unit: f"{int(self) / count:.2f}".rstrip("0").rstrip(".") for unit, count in UNITS.items()}
        written = [f"{int(self)}B", *(number + unit for unit, number in numbers.items())]
        exact = [text for text in written if _count(text) == self]
        return min(exact, key=lambda text: (len(text), text.startswith("0.")))

    def __repr__(self) -> str:
        return f"Bytes({str(self)!r})"


def about(count: int) -> str:
    """A size for a message: "8GiB" if that is exact, else "13.7GiB"."""
    text = str(Bytes(count))
    unit = _unit(count)
    if len(text) <= SHORT and (unit == "B" or text != f"{count}B"):
        return text
    number = count / UNITS[unit]
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}{unit}"


def enough(count: int) -> str:
    """A size of at least this count, at most a tenth of its unit above it: "13.8GiB"."""
    unit = _unit(count)
    tenths = -(-10 * count // UNITS[unit])
    return f"{tenths // 10}{f'.{tenths % 10}' if tenths % 10 else ''}{unit}"


def _unit(count: int) -> str:
    return next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if count >= UNITS[unit]), "B")
