"""The table of settings: each dotted key ("zo.eps") with its type, default and doc line.

It is made once from schema.py and the methods' rows. A field whose type is a dataclass is a section; its fields appear
under their dotted names and the section itself does not.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from keyhole.config.schema import RunConfig, TrainConfig
from keyhole.limits import fits
from keyhole.methods import METHODS
from keyhole.methods.settings import Around, MethodSettings, kinds
from keyhole.methods.traits import Traits

RUN = {each.name for each in dataclasses.fields(RunConfig)}


@dataclass(frozen=True)
class Setting:
    """One key a user can set."""

    key: str
    type: Any
    default: object  # MISSING: there is none
    doc: str


@functools.cache
def sections() -> dict[str, type]:
    """Section name -> dataclass, in the order of the schema."""
    types = kinds(TrainConfig)
    return {name: kind for name, kind in types.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


def run_keys(cls: type) -> dict[str, Any]:
    """The keys of the run that are settings of a method as well, each with the type that it has there."""
    own = [each for each in dataclasses.fields(cls) if not each.metadata.get("python")]
    return {key: kinds(cls)[each.name] for each in own if (key := each.metadata.get("key", each.name)) in RUN}


def own_keys(cls: type) -> set[str]:
    """The fields of a section, without settings of a method that are the run's, or have no key."""
    own = [each for each in dataclasses.fields(cls) if not each.metadata.get("python")]
    return {each.name for each in own if each.metadata.get("key", each.name) not in RUN}


def own_settings(config: TrainConfig, row: Traits | None = None) -> MethodSettings:
    """The settings of the config's method, or of another one: its section, and what is a setting of the run (for
    another method: as far as it can have that value)."""
    row = row or METHODS[config.method]
    section: MethodSettings = vars(config)[row.section]
    types, shared = run_keys(type(section)), dict[str, Any]()
    for each in dataclasses.fields(section):
        key = each.metadata.get("key", each.name)
        value = vars(config).get(key)
        if key in types and (value is not None or each.default is None) and fits(value, types[key]):
            shared[each.name] = value
    return dataclasses.replace(section, **shared)


def around(config: TrainConfig) -> Around:
    """What a method's settings may contradict."""
    return Around(config.wire, config.placement, config.max_steps)


@functools.cache
def settings() -> dict[str, Setting]:
    """All settings by dotted key: the top level first, then section by section."""
    table: dict[str, Setting] = {}
    for section, cls in {"": TrainConfig, **sections()}.items():
        names = own_keys(cls) if section else RUN - sections().keys()
        for each in dataclasses.fields(cls):
            if each.name in names:
                key = f"{section}.{each.name}" if section else each.name
                table[key] = Setting(key, kinds(cls)[each.name], each.default, each.metadata["doc"])
    return table


MOVED = ("activations", "compile", "rounding", "beta1", "beta2", "eps", "threads")  # from methods to the run
RENAMED = {"offload.reverse_graphs": "offload.graphs"} | {
    f"{row.section}.{each.name}": each.metadata.get("key", each.name)
    for row in METHODS.values()
    for each in dataclasses.fields(row.settings)
    if each.name in MOVED and each.metadata.get("key", each.name) in RUN
}
"""Keys of earlier versions, and their names now: still taken, with a line that says so."""

PYTHON = "it is an argument of the method in Python: keyhole.{cls}(model, {name}=...)"
LOAD = "it is an argument of keyhole.load in Python, for measurements: keyhole.load(..., {name}=...)"
REMOVED = {f"{row.section}.{name}": why for row in METHODS.values() for name, why in row.settings.gone.items()}
REMOVED |= {
    f"{row.section}.{each.name}": PYTHON.format(cls=row.cls.rpartition(":")[2], name=each.name)
    for row in METHODS.values()
    for each in dataclasses.fields(row.settings)
    if each.metadata.get("python")
}
REMOVED |= {f"offload.{name}": LOAD.format(name=name) for name in ("overlap", "reuse_slots")}
REMOVED["offload.gather"] = "every rank uploads whole units; leave it out"
"""Keys of earlier versions that are gone, and what to do instead."""

REMOVED_VALUES = {
    "learning_rate=auto": "; no rate is searched any more: null is the method's default, and that of "
    "zo.estimator=fzoo, whose steps are normalised, suits most models"
}
