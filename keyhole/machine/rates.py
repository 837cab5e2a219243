"""The speed of a machine, in the few numbers that determine the time of a training step.

products        FLOP/s of 16-bit matrix products, by the number of rows (tokens): with few rows a GPU is slower.
                Between two known numbers of rows the rate is interpolated, outside it is that of the nearest.
device_memory   bytes/s that elementwise kernels read and write
up, down, both  bytes/s of page-locked copies over the link: each way alone, and each way while both run
host_memory     bytes/s that the CPU's threads read and write in host memory
adam            parameters/s of AdamW on fp32 state in host memory (28 bytes each: ops/adam.py)
called          seconds of the host for one operation in a block's forward pass, called from Python: its modules and
                autograd's record of it included
"""

from bisect import bisect_left
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from keyhole.machine.sizes import GIB, MIB

FP32_SHARE = 1 / 12  # of the 16-bit rate of products, on GPUs, if it was not measured
VERSION = 1  # of the saved file
WORKSPACE_BYTES, WORKSPACE_BYTES_9 = 8 * MIB + 128 * 1024, 32 * MIB  # of cuBLAS; from compute capability 9.0 on
CALLED = 23e-6  # if it was not measured: as on the host of an H200


@dataclass(frozen=True)
class Rates:
    """A machine. gpu_bytes: None without a GPU, when everything runs on the CPU."""

    name: str
    measured: bool
    gpu_bytes: int | None
    host_bytes: int
    products: dict[int, float]
    products_fp32: float
    device_memory: float
    up: float
    down: float
    both: float
    host_memory: float
    adam: float
    workspace_bytes: int = WORKSPACE_BYTES
    called: float = CALLED

    def products_at(self, rows: int, itemsize: int = 2) -> float:
        known = sorted(self.products)
        place = bisect_left(known, rows)
        if place == 0 or place == len(known):
            found = self.products[known[min(place, len(known) - 1)]]
        else:
            low, high = known[place - 1], known[place]
            share = (rows - low) / (high - low)
            found = (1 - share) * self.products[low] + share * self.products[high]
        best = self.products[known[-1]]
        return found if itemsize < 4 else self.products_fp32 * found / best

    def link_seconds(self, up_bytes: float, down_bytes: float) -> float:
        """Seconds of the copies: the bytes that can go both ways at once at the rate `both`, the rest at its own
        rate."""
        shared = min(up_bytes, down_bytes)
        alone = (up_bytes - shared) / self.up + (down_bytes - shared) / self.down
        return shared / self.both + alone

    def with_link(self, rate: float) -> "Rates":
        """The same machine with another link rate; the rate of both ways at once scales with it."""
        share = self.both / max(self.up, self.down)
        return replace(self, up=rate, down=rate, both=rate * share)

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"products": {str(rows): rate for rows, rate in self.products.items()}}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "Rates":
        """ValueError if the dict does not describe a machine."""
        try:
            values = {each.name: found[each.name] for each in fields(cls)}
            values["products"] = {int(rows): float(rate) for rows, rate in found["products"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no rates of a machine: {error!r}") from error
        numbers = [*values["products"].values(), *(values[name] for name in _RATES)]
        if not values["products"] or not all(isinstance(n, int | float) and 0 < n < 1e30 for n in numbers):
            raise ValueError("rates must be numbers above 0")
        return cls(**values)

    def lines(self) -> list[str]:
        where = f"{self.gpu_bytes / GIB:.0f} GiB GPU, " if self.gpu_bytes else "no GPU, "
        best = max(self.products.values()) / 1e12
        link = f"link {self.up / 1e9:.0f} GB/s up, {self.down / 1e9:.0f} down, {self.both / 1e9:.0f} each way at once; "
        return [
            f"machine: {self.name} ({'measured' if self.measured else 'estimates from data sheets'}): {where}"
            f"{self.host_bytes / GIB:.0f} GiB host memory",
            f"rates: products {best:.3g} TFLOP/s; {link if self.gpu_bytes else ''}host memory "
            f"{self.host_memory / 1e9:.0f} GB/s; AdamW on the CPU {self.adam / 1e9:.2g} G parameters/s",
        ]


_RATES = ("products_fp32", "device_memory", "up", "down", "both", "host_memory", "adam", "called")
