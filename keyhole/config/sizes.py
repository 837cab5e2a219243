"""Sizes of memory: an int of bytes that reads and writes itself with its unit ("8GiB").

    KiB MiB GiB TiB = 2^10 2^20 2^30 2^40        KB MB GB TB = 10^3 10^6 10^9 10^12        B = 1

keyhole prints GiB everywhere; GB is read because data sheets and link rates use it. A bare number or "8G" is
refused: one would mean eight bytes and the other could mean either unit, and a guess would be 7 % wrong.
str() is exact: the largest binary unit that divides the count, so that a config survives a round trip.
"""

import re

UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_BY_LOWER = {unit.lower(): count for unit, count in UNITS.items()}
_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)")
EXPECTED = "a size with its unit, such as 8GiB or 800MiB"


class Bytes(int):
    """A number of bytes; `Bytes.parse("8GiB") == 8 * 2**30` and `str(Bytes(2**33)) == "8GiB"`."""

    @classmethod
    def parse(cls, text: "str | int") -> "Bytes":
        """Reads a size; an int is taken as bytes. ValueError names what was expected."""
        if isinstance(text, int) and not isinstance(text, bool):
            count = int(text)
        else:
            match = _PATTERN.fullmatch(str(text).strip())
            if match is None or match[2].lower() not in _BY_LOWER:
                raise ValueError(EXPECTED)
            number = float(match[1]) if "." in match[1] else int(match[1])
            count = round(number * _BY_LOWER[match[2].lower()])
        if count < 1:
            raise ValueError(EXPECTED)
        return cls(count)

    def __str__(self) -> str:
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if int(self) % UNITS[unit] == 0:
                return f"{int(self) // UNITS[unit]}{unit}"
        return f"{int(self)}B"

    def __repr__(self) -> str:
        return f"Bytes({str(self)!r})"
