"""The tables of `keyhole bench`: a case is a row, a table is a list of cases, a file (tables/*.yaml) is some tables.

    NAME:                          what --cases chooses
      title: what the table shows
      each: {batch: 4}             keys of every row that does not have them
      quick: {options: {d: 16}}    what a quick run changes, of rows that have it
      cases:
        - {model: 13B, batch: [1, 4], system: [resident, streamed]}      a list: one case per item

A row is checked against the types of Case; errors name the file, the table, the row and the key. Tables share cases: a
case in several of them runs once. A table can run on other models than its own (for_models). A model that does not fit
host memory runs with fewer `blocks`.
"""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from reprlib import repr  # shortens deeply nested aliases
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import yaml

from keyhole.bench.shapes import BLOCKS, POSITIONS, known
from keyhole.config.loader import read_text
from keyhole.errors import UserError
from keyhole.limits import describe, fits
from keyhole.methods import METHODS
from keyhole.methods.zo.traits import ZO

TABLES = Path(__file__).parent / "tables"
NATIVE, RESIDENT, TEXTBOOK, STREAMED = SYSTEMS = ("native", "resident", "textbook", "streamed")  # in this order
BASELINES = (NATIVE, TEXTBOOK)
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
Options = dict[str, Any]
if TYPE_CHECKING:
    Model = str
    System = str
    Method = str
    Dtype = str
else:
    Model, System, Method, Dtype = (Literal[*words] for words in (BLOCKS, SYSTEMS, METHODS, ELEMENT_BYTES))


@dataclass(frozen=True)
class Case:
    """A row: what runs, on which shape, and how. Baselines (baselines.py has their options): `textbook` is MeZO's loop,
    `native` torch's optimizer (`optimizer` and its arguments)."""

    model: Model
    system: System
    method: Method = ZO.name
    title: str = ""  # the name; without it, one that tells what is set
    dtype: Dtype = "bf16"
    batch: int = 1
    length: int = POSITIONS
    micro_batches: int = 1  # per step
    blocks: int | None = None  # None: all of them
    gpu_memory: str | None = None  # the budget; None: all of the device
    quick_gpu_memory: str | None = None  # the budget of a quick run
    wire: str | None = None
    device: str = ""  # "": the run's; cpu: beside a GPU
    rule: str = ""  # what is computed: a row is compared with the fastest baseline of its rule and shape
    saving: Literal["", "background", "torch.save", "replay"] = ""  # in snapshots.yaml; "replay": a journal is applied
    compare: str = ""  # the resident case whose step is the compute floor; without it, the one of the same shape
    load: Options = field(default_factory=dict)  # of keyhole.load: overlap, reuse_slots
    options: Options = field(default_factory=dict)  # settings of the method

    @property
    def name(self) -> str:
        if self.title:
            return self.title
        other = (self.load | self.options).items()  # than in a usual run: no_overlap, compile, write_back_every_1
        words = [
            self.model,
            self.dtype,
            f"b{self.batch}",
            f"t{self.length}" if self.length != POSITIONS else "",
            f"{self.blocks}blocks" if self.blocks else "",
            self.system,
            self.gpu_memory or "",
            *(f"no_{key}" if x is False else key if x is True else f"{key}_{x}".replace(" ", "_") for key, x in other),
            f"wire_{self.wire}" if self.wire else "",
            self.device,
            self.saving,
        ]
        return "-".join(filter(None, words))

    @property
    def group(self) -> tuple[str, str, int | None]:
        """Cases that follow each other and have the same run in one process."""
        return self.model, self.dtype, self.blocks

    @property
    def tokens(self) -> int:
        return self.batch * self.length * self.micro_batches

    def companion(self, system: str) -> str:
        """Name of the case that this one is compared with: no budget, the plain wire, nothing switched off."""
        compiled = {k: v for k, v in self.options.items() if k == "compile" and system != TEXTBOOK}
        return replace(self, system=system, gpu_memory=None, wire=None, load={}, options=compiled).name

    @property
    def work(self) -> tuple[str, str, str, int, int, int, int | None]:
        """What rows must share to do the same work."""
        return self.rule, self.model, self.dtype, self.batch, self.length, self.micro_batches, self.blocks

    def quickly(self, changes: Options) -> "Case":
        """The case of a quick run: of the options only those that it has change."""
        options = {key: changes.get("options", {}).get(key, value) for key, value in self.options.items()}
        return replace(self, **(changes | {"options": options}))


@dataclass(frozen=True)
class Table:
    title: str
    cases: list[Case]


def read_tables(path: Path, quick: bool = False) -> dict[str, Table]:
    try:
        found = yaml.safe_load(read_text(path))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"--table: cannot read {path}: {error}") from error
    if not isinstance(found, dict) or not found:
        raise UserError(f"{path}: a mapping of tables is needed; the files in {TABLES} are examples")
    tables = {}
    for name, table in found.items():
        if not isinstance(table, dict) or not isinstance(table.get("cases"), list) or not table["cases"]:
            raise UserError(f"{path}: {name}: a list `cases` is needed; the files in {TABLES} are examples")
        rows = [row for each in table["cases"] for row in _expanded(table.get("each", {}), each)]
        cases = [case_of(row, f"{path}: {name}: case {i}") for i, row in enumerate(rows, 1)]
        cases = [case.quickly(table.get("quick", {})) for case in cases] if quick else cases
        tables[str(name)] = Table(str(table.get("title", name)), cases)
    return tables


def _expanded(usual: Options, row: Any) -> Iterator[Any]:
    """One row per combination of the items of its lists, the last list varying fastest."""
    row = usual | row if isinstance(row, dict) else {"a row": row}
    for chosen in product(*(value if isinstance(value, list) else [value] for value in row.values())):
        yield dict(zip(row, chosen, strict=True))


def case_of(row: Options, where: str) -> Case:
    """The row as a case, every key and value checked."""
    types = get_type_hints(Case)
    for key, value in row.items():
        if key not in types:
            raise UserError(f"{where}: {key!r} is not one of {', '.join(types)}")
        if not fits(value, types[key]):
            raise UserError(f"{where}: {key}: found {repr(value)}, expected {describe(types[key])}")
    for key in ("model", "system"):
        if key not in row:
            raise UserError(f"{where}: {key!r} is missing")
    return Case(**row)


def select(tables: dict[str, Table], words: list[str], only: str = "") -> dict[str, Table]:
    """The requested tables, with the chosen cases. words: tables, `all`, or patterns of case names (13B-bf16-*); a case
    chosen by a pattern is shown in the first table that has it. only: cases with this in their name."""
    chosen: dict[str, set[str]] = {}
    first = {case.name: name for name in reversed(tables) for case in tables[name].cases}
    for word in words:
        names = list(tables) if word == "all" else [word]
        found = [(name, case.name) for name in names if name in tables for case in tables[name].cases]
        found = found or [(first[name], name) for name in first if fnmatch.fnmatchcase(name, word)]
        if not found:
            says = ", ".join([*tables, "all"])
            raise UserError(f"--cases: {word!r} is neither a table ({says}) nor a case, such as {next(iter(first))}")
        for table, case in found:
            chosen.setdefault(table, set()).add(case)
    every = {name for name in set().union(*chosen.values()) if only in name}
    if not every:
        raise UserError(f"--only: no case has {only!r} in its name; there is {next(iter(first))!r}, ...")
    return {name: Table(tables[name].title, [c for c in tables[name].cases if c.name in every]) for name in chosen}


def for_models(tables: dict[str, Table], models: list[str]) -> dict[str, Table]:
    """Every case on these models instead of its own, with all their blocks; without models, the tables unchanged."""
    if not models:
        return tables
    names, found = [known(name) for name in models], {}
    for name, table in tables.items():
        cases = [replace(case, model=model, blocks=None) for model in names for case in table.cases]
        found[name] = Table(table.title, list({case.name: case for case in cases}.values()))
    return found


def ordered(tables: dict[str, Table]) -> list[Case]:
    """Every case once, those of one group together, in the order of their first cases; floors and baselines first."""
    groups: dict[tuple[str, str, int | None], list[Case]] = {}
    for case in {case.name: case for table in tables.values() for case in table.cases}.values():
        groups.setdefault(case.group, []).append(case)
    return [case for members in groups.values() for case in sorted(members, key=lambda c: SYSTEMS.index(c.system))]
