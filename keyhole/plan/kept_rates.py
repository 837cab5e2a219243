"""The rates of this machine, kept from one call to the next (measure.py measures them, in a few seconds).

They are in rates/rates.json of the user's cache (disk/user_cache.py), by GPU, CPU, cores and version of torch, written
with one rename. If the file cannot be read, the machine is measured again; a failure to write it is ignored. `known`
never measures: a run that starts uses it.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from keyhole.disk.files import make_directories, replacing
from keyhole.disk.json_text import read_json
from keyhole.disk.user_cache import cache_directory
from keyhole.errors import UserError
from keyhole.machine.host import cpu_count
from keyhole.machine.probe import cpu_name
from keyhole.machine.rates import VERSION, Rates
from keyhole.plan.measure import measure
from keyhole.plan.profiles import profile_of

LIMIT_BYTES = 2**20


def cache_file() -> Path | None:
    """The file with kept measurements; None if the user has no cache directory."""
    directory = cache_directory("rates")
    return None if directory is None else directory / "rates.json"


def key_of(device: torch.device) -> str:
    """The key of a measurement: GPU, CPU, cores, version of torch."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    return f"{VERSION} | {gpu} | {cpu_name()} | {cpu_count()} cores | torch {torch.__version__}"


def known(device: torch.device) -> Rates | None:
    """The rates measured here before, or the profile of this GPU; None if there is neither."""
    kept = _read().get(key_of(device))
    if kept is not None:
        with suppress(ValueError):
            return Rates.from_dict(kept)
    return profile_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def rates_of(device: torch.device, again: bool = False, say: Callable[[str], None] = lambda text: None) -> Rates:
    """The rates of this machine: kept, or measured now. again: measure in any case."""
    kept = None if again else _read().get(key_of(device))
    if kept is not None:
        with suppress(ValueError):
            return Rates.from_dict(kept)
    say("measuring this machine (once, a few seconds) ...")
    found = measure(device)
    _keep(key_of(device), found, say)
    return found


def _read() -> dict[str, Any]:
    path = cache_file()
    try:
        return {} if path is None else read_json(path, "rates", LIMIT_BYTES)
    except UserError:
        return {}


def _keep(key: str, found: Rates, say: Callable[[str], None]) -> None:
    path = cache_file()
    if path is None:
        return
    try:
        make_directories(path.parent)
        with replacing(path) as file:
            file.write(json.dumps(_read() | {key: found.to_dict()}, indent=1).encode())
    except OSError as error:
        say(f"the measurement could not be kept in {path}: {error.strerror or error}")
