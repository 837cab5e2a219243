"""What is run: a case is a model, a system and its settings; a table is a list of cases.

Tables share cases: a case that stands in several is run once. Cases of one model are run together, because
making the weights costs more than timing a few steps:

    group      same model, dtype, number of blocks, positions       one process, in the order of importance
      load     same placement, budget and engine options            one copy of the weights
        case   batch size, textbook or zo, deferred update and rare write-backs or not

`textbook` and `resident` use the same load: the textbook loop runs on the resident model's own HF module.
"""

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from keyhole.bench.shapes import blocks_within, parameter_count
from keyhole.errors import UserError

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
HOST_LIMIT_BYTES = 64 * 2**30  # a model of this size is run whole
FEW_BLOCKS_BYTES = 20 * 2**30  # of a larger one, so many blocks
GIANT_BLOCKS = 4
SWITCHES = ("overlap", "reuse_slots", "deferred_update", "rare_write_backs")


@dataclass(frozen=True)
class Case:
    """One line of a table."""

    model: str
    system: str  # textbook | resident | streamed
    dtype: str = "bf16"
    batch: int = 1
    length: int = 2048
    blocks: int | None = None  # None: all of them
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
        words += [f"t{self.length}"] if self.length != 2048 else []
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
    def group(self) -> tuple:
        return self.model, self.dtype, self.blocks, max(self.length, 2048)

    @property
    def load(self) -> tuple:
        """Cases with the same load run on the same weights. A plan for a budget depends on tokens."""
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


def trio(**settings: Any) -> list[Case]:
    """A streamed case with its two companions: compute alone, and the baseline."""
    return [Case(system=system, **settings) for system in ("resident", "textbook", "streamed")]


def judged() -> list[Case]:
    """Every case that a target is set for, the most telling first."""
    budgets = [Case("13B", "streamed", gpu_memory=f"{n}GiB") for n in (16, 4, 8, 24)]
    return [
        *trio(model="1.3B"),
        *trio(model="6.7B"),
        *trio(model="6.7B", batch=4),
        *trio(model="13B"),
        *trio(model="13B", batch=4),
        *budgets,
        *giant(),
        *trio(model="6.7B", dtype="fp32"),
    ]


def giant() -> list[Case]:
    """The 175B shape with few blocks, as it comes and in 4 GiB."""
    shape = {"model": "175B", "blocks": GIANT_BLOCKS}
    return [
        Case(system="resident", **shape),
        Case(system="streamed", **shape),
        Case(system="streamed", gpu_memory="4GiB", **shape),
    ]


def sizes() -> list[Case]:
    """Model sizes in bf16 and fp32; those that do not fit host memory with fewer blocks."""
    found = []
    for dtype in ("bf16", "fp32"):
        for model in ("125M", "350M", "1.3B", "2.7B", "6.7B", "13B", "30B", "66B", "175B"):
            blocks = blocks_within(model, ELEMENT_BYTES[dtype], HOST_LIMIT_BYTES, FEW_BLOCKS_BYTES)
            found += trio(model=model, dtype=dtype, blocks=blocks)
    return found


def ablation() -> list[Case]:
    """Each part switched off, where the link binds (batch 1) and where compute does (batch 4)."""
    found = []
    for batch in (1, 4):
        base = Case("6.7B", "streamed", batch=batch)
        found += [replace(base, system="resident"), replace(base, system="textbook"), base]
        found += [replace(base, **{switch: False}) for switch in SWITCHES]
        found += [replace(base, **dict.fromkeys(SWITCHES, False))]
    return found


def wire() -> list[Case]:
    """Formats on the link."""
    from keyhole.model.weights.format import FORMATS

    base = Case("6.7B", "streamed")
    return [
        replace(base, system="resident"),
        replace(base, system="textbook"),
        base,
        *[replace(base, wire=name) for name in FORMATS],
    ]


def batches() -> list[Case]:
    return [case for batch in (1, 2, 4, 8) for case in trio(model="6.7B", batch=batch)]


def compiled() -> list[Case]:
    """Blocks by torch.compile, beside plain ones."""
    found = trio(model="6.7B", batch=4)
    return found + [replace(case, compiled=True) for case in found if case.system != "textbook"]


def lengths() -> list[Case]:
    return [case for length in (1024, 2048, 4096, 8192) for case in trio(model="6.7B", length=length)]


def budgets() -> list[Case]:
    budget = [Case("13B", "streamed", gpu_memory=f"{n}GiB") for n in (4, 8, 16, 24)]
    return [*trio(model="13B"), *budget]


TABLES: dict[str, Callable[[], list[Case]]] = {
    "judged": judged,
    "sizes": sizes,
    "ablation": ablation,
    "wire": wire,
    "batches": batches,
    "compiled": compiled,
    "lengths": lengths,
    "budgets": budgets,
    "giant": giant,
}


def select(words: list[str]) -> tuple[list[str], list[Case]]:
    """Tables and cases by name: a table, `all`, or a pattern of case names (13B-bf16-*). Each case once.

    A case chosen by a pattern is shown in the first table that holds it."""
    tables: list[str] = []
    cases: dict[str, Case] = {}
    everything = {case.name: (table, case) for table in reversed(TABLES) for case in TABLES[table]()}
    for word in words:
        names = list(TABLES) if word == "all" else [word]
        found = [(name, case) for name in names if name in TABLES for case in TABLES[name]()]
        if not found:
            found = [pair for name, pair in everything.items() if fnmatch.fnmatchcase(name, word)]
        if not found:
            known = ", ".join([*TABLES, "all"])
            raise UserError(
                f"--cases: {word!r} is neither a table ({known}) nor a case, such as {next(iter(everything))}"
            )
        for table, case in found:
            cases.setdefault(case.name, case)
            if table not in tables:
                tables.append(table)
    return tables, list(cases.values())


def grouped(cases: list[Case]) -> list[list[Case]]:
    """Cases by group, groups in the order of their first case; inside, one load after the other."""
    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    rank = {"resident": 0, "textbook": 1, "streamed": 2}
    ordered = []
    for members in groups.values():
        loads = {load: i for i, load in enumerate(dict.fromkeys(case.load for case in members))}
        ordered.append(sorted(members, key=lambda c: (rank[c.system], loads[c.load], c.tokens, c.switched_off)))
    return ordered
