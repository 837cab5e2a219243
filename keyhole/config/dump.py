"""Writes a config as YAML that the loader reads, so that a run can be repeated from run/config.yaml.

All values are written, including defaults: a later version with other defaults must not change an old run.
"""

import dataclasses
import io
from pathlib import Path
from typing import Any

import yaml

from keyhole.config.fields import own_keys
from keyhole.config.schema import TrainConfig
from keyhole.machine.sizes import Bytes

_Fastest: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the emitter of libyaml is four times as fast


class _Dumper(_Fastest):
    """Safe YAML that quotes the word `None`, which the loader would read as null."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    quoted = text in ("None", "none") or not text.isprintable()  # unquoted, PyYAML would fold unusual line breaks
    style = '"' if quoted else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(Bytes, lambda dumper, size: _represent_text(dumper, str(size)))
_Dumper.add_multi_representer(Path, lambda dumper, path: _represent_text(dumper, str(path)))


def dump(value: Any) -> str:
    """Plain data as block YAML, keys in the order given, lines never folded."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**30))


def to_node(value: Any) -> yaml.MappingNode:
    """The YAML nodes of `dump(value)`, made without the text."""
    return _Dumper(io.StringIO(), sort_keys=False).represent_data(value)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """All values, sections nested; a plain int in gpu_memory gets its unit."""
    values = {each.name: vars(config)[each.name] for each in dataclasses.fields(config)}
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            values[name] = _section(value)
    if isinstance(config.gpu_memory, int):
        values["gpu_memory"] = Bytes(config.gpu_memory)
    return values


def _section(own: Any) -> dict[str, Any]:
    """The keys of a section; and what a caller of TrainConfig(..) has put there although it is a setting of the run,
    which the loader then moves or refuses."""
    keys = own_keys(type(own))
    return {
        each.name: vars(own)[each.name]
        for each in dataclasses.fields(own)
        if each.name in keys or vars(own)[each.name] != each.default
    }


def to_yaml(config: TrainConfig) -> str:
    """The config as YAML text."""
    return dump(to_dict(config))
