"""The files of a run that a model card is made of, checked: a card is made, or Unusable says which file is in the way.

run/config.yaml      a mapping, with values of the types that the settings have; settings that are unknown here
                     (another version's) are left out
run/metrics.jsonl    lines that are no entries of a run, and values that are no numbers, are left out: a crash may
                     have left an incomplete line
run/env.json         versions and devices, as texts
config.json          an object
"""

import json
from pathlib import Path
from typing import Any

import yaml

from keyhole.config.dump import to_node
from keyhole.config.fields import sections, settings
from keyhole.config.types import Mismatch, parse, show
from keyhole.disk.files import read_small
from keyhole.errors import printable

MOST_BYTES = 2**30  # limit of metrics.jsonl, which has a line per step
MOST_SMALL = 2**22
NEEDED = ("model", "method")


class Unusable(Exception):
    """A file of which no card can be made; the message names it."""


def read_settings(path: Path) -> dict[str, Any]:
    """Every setting of the run, as run/config.yaml has them, over the defaults."""
    try:
        found = yaml.safe_load(_text(path, MOST_SMALL))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise Unusable(f"{path} is no YAML ({printable(_first_line(error), 200)})") from error
    if not isinstance(found, dict):
        raise Unusable(f"{path} holds no mapping of settings")
    settled = {key: setting.default for key, setting in settings().items() if not setting.required}
    for key, value in found.items():
        if key in sections():
            if not isinstance(value, dict):
                raise Unusable(f"{path} has no mapping for {key}")
            own = {name: f"{key}.{name}" for name in value if f"{key}.{name}" in settings()}
            settled[key] = {name: _typed(path, dotted, value[name]) for name, dotted in own.items()}
        elif key in settings():
            settled[key] = _typed(path, key, value)
    if lacks := [key for key in NEEDED if key not in settled]:
        raise Unusable(f"{path} lacks {lacks[0]}")
    return settled


def _typed(path: Path, key: str, value: Any) -> Any:
    """A value with the type of its setting."""
    try:
        return parse(node := to_node(value), settings()[key].type)
    except Mismatch as error:
        raise Unusable(f"{path} has {show(node)} for {key}, where {error} is expected") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise Unusable(f"{path} has a value for {key} that no run writes") from error


def read_entries(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """The entries of run/metrics.jsonl, up to a step."""
    entries = []
    for line in _text(path, MOST_BYTES).splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and type(found.get("step")) is int and (last is None or found["step"] <= last):
            entries.append({key: value for key, value in found.items() if type(value) in (int, float, type(None))})
    return entries


def read_environment(path: Path) -> tuple[dict[str, str], list[str]]:
    """(versions by name, names of the devices) of run/env.json; empty if it does not exist."""
    if not path.exists():
        return {}, []
    found = read_object(path)
    versions, gpus, cpu = (found.get(key, kind()) for key, kind in (("versions", dict), ("gpus", list), ("cpu", dict)))
    if not isinstance(versions, dict) or not isinstance(gpus, list) or not isinstance(cpu, dict):
        raise Unusable(f"{path} holds no versions and devices")
    named = [each["name"] for each in (gpus or [cpu]) if isinstance(each, dict) and isinstance(each.get("name"), str)]
    return {str(name): str(version) for name, version in versions.items() if version}, named


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, such as config.json of the model."""
    try:
        found = json.loads(_text(path, MOST_SMALL))
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{path} is no JSON ({printable(_first_line(error), 200)})") from error
    if not isinstance(found, dict):
        raise Unusable(f"{path} holds no object {{...}}")
    return found


def _text(path: Path, most_bytes: int) -> str:
    try:
        return read_small(path, most_bytes).decode("utf-8", errors="replace")
    except OSError as error:
        raise Unusable(f"{path} cannot be read ({error.strerror or error})") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or "nested too deeply"
