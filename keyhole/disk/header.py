"""Reads the header of a safetensors file, which says where its tensors are. Without torch.

A file may be damaged or hostile, so every entry is checked before anything is read by it: its offsets lie in the file,
and a tensor has as many bytes as its shape and dtype say.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

HEADER_BYTES = 100 * 10**6  # limit of the safetensors library


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(name -> dtype, shape, data_offsets; where the data begin) of a safetensors file. ValueError if it is
    impossible: a header longer than the file, or data outside of it."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(HEADER_BYTES, size_bytes - 8):
            raise ValueError(f"{path.name} has {size_bytes} bytes, its header says {length}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, about in header.items():
                _check_entry(name, about)
                if about["data_offsets"][1] > size_bytes - 8 - length:
                    raise ValueError(f"{path.name} ends before the data of {name}")
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path.name} has a header that cannot be read: {error!r}") from None
    return header, 8 + length


def _check_entry(name: str, about: dict[str, Any]) -> None:
    first, last = about["data_offsets"]
    bits = int(re.sub(r"\D", "", about["dtype"].partition("_")[0]) or 8)  # F32, BF16, U8, F8_E4M3, BOOL
    whole = all(type(number) is int and number >= 0 for number in (first, last, *about["shape"]))
    if not whole or (last - first) * 8 != math.prod(about["shape"]) * bits:
        raise ValueError(f"the header's entry of {name} cannot be true: {about}")
