"""The cases of `keyhole bench zo`: a case is a model, a system and its settings; a table is a list of cases.

Tables share cases: a case in several tables is run once. Cases of one model are run together, because making
the weights takes longer than timing a few steps:

    group      same model, dtype, number of blocks, positions       one process, in the order of importance
      load     same placement, budget and engine options            one copy of the weights
        case   batch size, textbook or zo, with or without deferred updates and rare write-backs

The tables are in tables/zo.yaml. `textbook` and `resident` use the same load: the textbook loop runs on the resident
model's own Hugging Face module. A table can be run on other models than its own (for_models), and a model that does
not fit host memory is cut to as many blocks as fit (cut), the same number for all cases of that model and dtype, so
that ratios compare equal shapes.
"""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from keyhole.bench.rows import TABLES, list_of, one_of, read_yaml, row_as
from keyhole.bench.shapes import MODELS, POSITIONS, fitting_blocks, parameter_count
from keyhole.errors import UserError
from keyhole.machine.sizes import GIB

SYSTEMS = ("resident", "textbook", "streamed")  # in the order in which a group runs them
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SWITCHES = ("overlap", "reuse_slots", "deferred_update", "rare_write_backs")


@dataclass(frozen=True)
class Case:
    """One line of a table."""

    model: str = one_of(MODELS)
    system: str = one_of(SYSTEMS)
    dtype: str = one_of(ELEMENT_BYTES, default="bf16")
    batch: int = 1
    length: int = 2048
    blocks: int | None = None  # None: all of them, or as many as fit host memory (cut)
    gpu_memory: str | None = None
    overlap: bool = True
    reuse_slots: bool = True
    deferred_update: bool = True
    rare_write_backs: bool = True
    wire: str | None = None
    compiled: bool = False

    @property
    def name(self) -> str:
        words = [self.model, self.dtype, f"b{self.batch}"]
        words += [f"t{self.length}"] if self.length != POSITIONS else []
        words += [f"{self.blocks}blocks"] if self.blocks else []
        words += [self.system]
        words += [self.gpu_memory] if self.gpu_memory else []
        words += [f"no_{switch}" for switch in self.switched_off]
        words += [f"wire_{self.wire}"] if self.wire else []
        words += ["compiled"] if self.compiled else []
        return "-".join(words)

    @property
    def switched_off(self) -> list[str]:
        return [switch for switch in SWITCHES if not getattr(self, switch)]

    @property
    def group(self) -> tuple[Any, ...]:
        return self.model, self.dtype, self.blocks, max(self.length, POSITIONS)

    @property
    def load(self) -> tuple[Any, ...]:
        """The key of loaded weights: cases with the same key share them. With a budget the plan depends on the
        tokens."""
        if self.system != "streamed":
            return self.group, "resident"
        tokens = self.tokens if self.gpu_memory or self.wire else None
        return self.group, self.gpu_memory, tokens, self.overlap, self.reuse_slots, self.wire, self.compiled

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def weight_bytes(self) -> int:
        return parameter_count(self.model, self.blocks) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class Table:
    """Cases that are shown together."""

    title: str
    cases: list[Case]


def read_tables(path: Path = TABLES / "zo.yaml") -> dict[str, Table]:
    """The tables of a file, by name."""
    tables = {}
    for name, found in read_yaml(path).items():
        where = f"{path}: {name}"
        rows = [
            row for rows in list_of(found if isinstance(found, dict) else {}, "cases", where) for row in _each(rows)
        ]
        cases = [row_as(Case, row, f"{where}: case {i}") for i, row in enumerate(rows, 1)]
        tables[str(name)] = Table(str(found.get("title", name)), cases)
    return tables


def _each(row: Any) -> Iterator[Any]:
    """Expands a row: one row per combination of the items of its lists, the last list varying fastest."""
    if not isinstance(row, dict):
        yield row
        return
    values = [value if isinstance(value, list) else [value] for value in row.values()]
    for chosen in product(*values):
        yield dict(zip(row, chosen, strict=True))


def select(words: list[str], tables: dict[str, Table]) -> dict[str, Table]:
    """The requested tables, with the chosen cases: a word is a table, `all`, or a pattern of case names
    (13B-bf16-*). A case chosen by a pattern is shown in the first table that has it."""
    chosen: dict[str, set[str]] = {}
    first = {case.name: name for name in reversed(tables) for case in tables[name].cases}
    for word in words:
        names = list(tables) if word == "all" else [word]
        found = [(name, case.name) for name in names if name in tables for case in tables[name].cases]
        found = found or [(first[name], name) for name in first if fnmatch.fnmatchcase(name, word)]
        if not found:
            known = ", ".join([*tables, "all"])
            raise UserError(f"--cases: {word!r} is neither a table ({known}) nor a case, such as {next(iter(first))}")
        for table, case in found:
            chosen.setdefault(table, set()).add(case)
    every = set().union(*chosen.values())
    return {name: Table(tables[name].title, [c for c in tables[name].cases if c.name in every]) for name in chosen}


def for_models(tables: dict[str, Table], models: list[str]) -> dict[str, Table]:
    """Every case on these models instead of its own, with all their blocks; without models, the tables unchanged."""
    for name in models:
        if name not in MODELS:
            raise UserError(f"--models: {name!r} is not one of {', '.join(MODELS)}")
    if not models:
        return tables
    found = {}
    for name, table in tables.items():
        cases = dict.fromkeys(replace(case, model=model, blocks=None) for model in models for case in table.cases)
        found[name] = Table(table.title, list(cases))
    return found


def cut(tables: dict[str, Table], host_bytes: int) -> tuple[dict[str, Table], list[str]]:
    """The tables with fewer blocks for models that do not fit this much host memory, in the widest format of their
    cases; and lines about what was cut. Cases that state their blocks are unchanged."""
    whole = [case for table in tables.values() for case in table.cases if case.blocks is None]
    widest: dict[tuple[str, str], int] = {}
    for case in whole:
        key, width = (case.model, case.dtype), ELEMENT_BYTES.get(case.wire or case.dtype, 1)
        widest[key] = max(widest.get(key, 0), width, ELEMENT_BYTES[case.dtype])
    blocks = {key: fitting_blocks(key[0], width, host_bytes) for key, width in widest.items()}

    def fitted(case: Case) -> Case:
        return replace(case, blocks=blocks[case.model, case.dtype]) if case.blocks is None else case

    said = [
        f"{model} in {dtype}: {count} of {MODELS[model][1]} blocks, what {host_bytes / GIB:.0f} GiB of host memory hold"
        for (model, dtype), count in blocks.items()
        if count is not None
    ]
    return {name: Table(t.title, [fitted(case) for case in t.cases]) for name, t in tables.items()}, said


def grouped(tables: dict[str, Table]) -> list[list[Case]]:
    """Every case once, in groups, ordered by their first case; within a group, one load after the other."""
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in dict.fromkeys(case for table in tables.values() for case in table.cases):
        groups.setdefault(case.group, []).append(case)
    ordered = []
    for members in groups.values():
        loads = list(dict.fromkeys(case.load for case in members))
        rank = {c: (SYSTEMS.index(c.system), loads.index(c.load), c.tokens, c.switched_off) for c in members}
        ordered.append(sorted(members, key=rank.__getitem__))
    return ordered
