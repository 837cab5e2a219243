"""A model's parameters laid out as one flat array, cut into units that are moved together.

Every element of every parameter gets an index in one flat, virtual array of the model. That index is both

  - its place in host memory (a unit is a contiguous range of the array, so moving it is one copy), and
  - its counter for the noise: z is a function of (seed, step, direction, index) and of nothing else.

So the layout must depend only on the architecture, not on the device, the budget or the placement. In order:

    common   everything small or special: norms, position tables, biases of the head. Always on the device.
    table    the input embedding (vocabulary x width), cut into chunks of CHUNK_ROWS rows
    blocks   the matrices of the transformer blocks, block after block
    head     the output matrix, cut like the table; absent when it is tied to the table

Blocks are found by their structure (find.py). If one block is too large a transfer for the budget, it is cut further,
into runs of consecutive leaf modules; that changes where units begin and end, never an element's index. A very large
matrix of a linear layer may be cut by rows (model/forward/pieces.py computes with it); the bias of such a layer,
which all of its rows need, belongs to the common unit. Large stacks of experts are cut into experts (find.py), and
their biases belong to the common unit too: a pass holds the matrix of one expert at a time.

Each tensor starts at a multiple of ALIGN elements, which costs at most ALIGN - 1 elements of padding per tensor.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from keyhole.model.structure.block_counts import BlockCounts, block_counts
from keyhole.model.structure.find import Experts, Parts, find_parts, row_tiles

ALIGN = 64
CHUNK_ROWS = 8192
THINNEST = 4  # a tensor with a side of at most this many elements (a short convolution) is not a matrix


@dataclass(frozen=True)
class FlatTensor:
    """One parameter: its place in the flat array and its shape. A tied parameter appears once."""

    name: str
    start: int
    shape: torch.Size
    param: nn.Parameter = field(repr=False, compare=False)
    block: int | None = None  # the block that it belongs to; None outside of the blocks
    experts: int = 0  # number of experts, if this is a stack that is computed one expert at a time; else 0

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def expert(self, index: int) -> "FlatTensor":
        """The matrix of one expert of a stack, as a tensor of its own."""
        shape = self.shape[1:]
        name, start = f"{self.name}[{index}]", self.start + index * shape.numel()
        return replace(self, name=name, start=start, shape=shape, experts=0)

    @property
    def matrix(self) -> torch.Size:
        """The shape that is computed at once: its own, or that of one expert."""
        return self.shape[1:] if self.experts else self.shape

    @property
    def stacked(self) -> int:
        """The number of its matrices, if it is a stack of experts, also of one that is computed whole; else 0. Rules
        with a step size per matrix treat each by itself."""
        stacks = self.block is not None and len(self.shape) == 3 and min(self.shape[1:]) > THINNEST
        return self.shape[0] if self.experts or stacks else 0

    @property
    def in_matrices(self) -> bool:
        """Whether a rule for the matrices of blocks updates it."""
        return self.block is not None and (len(self.shape) == 2 or self.stacked > 0)


@dataclass
class Unit:
    """A contiguous range [start, stop) of the flat array that crosses the link in one copy."""

    index: int
    name: str
    kind: str  # "common" | "block" | "table" | "head"
    start: int
    stop: int
    tensors: list[FlatTensor]
    modules: list[nn.Module] = field(default_factory=list, repr=False)  # entering one of these requires the unit
    rows: tuple[int, int] | None = None  # range of the first axis, for chunks of a table, tiles of a matrix, experts
    block: int | None = None

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> tuple[int, int]:
        """`rows`, of a unit that holds some."""
        assert self.rows is not None
        return self.rows

    @property
    def expert(self) -> int | None:
        """The index of the expert, for a unit of a stack of experts."""
        return self.rows[0] if self.rows is not None and self.tensors[0].experts else None


@dataclass
class Layout:
    """The flat array: its tensors, and its units in order. Both are fixed, so sums over them are computed once: a deep
    model has a hundred thousand units, and a plan asks hundreds of times."""

    tensors: list[FlatTensor]
    units: list[Unit]
    numel: int
    block_count: int
    tied: bool  # the head shares the weights of the table
    experts: list[Experts]  # modules that are computed one expert at a time
    parts: Parts = field(repr=False, compare=False)

    @property
    def counts(self) -> BlockCounts | None:
        """What a block does per token; None if it could not be counted."""
        return block_counts(self.parts.module, self.parts.blocks)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with any name or shape of a tensor, and not with the units."""
        text = "\n".join(sorted(f"{tensor.name} {tuple(tensor.shape)}" for tensor in self.tensors))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def _by_kind(self) -> dict[str, list[Unit]]:
        kinds = dict.fromkeys(unit.kind for unit in self.units)
        return {kind: [unit for unit in self.units if unit.kind == kind] for kind in kinds}

    def of_kind(self, kind: str) -> list[Unit]:
        """The units of a kind: common, table, block or head. The caller must not change this list."""
        return self._by_kind.get(kind, [])

    @property
    def common(self) -> Unit:
        return self.units[0]

    @property
    def table(self) -> FlatTensor:
        return self.of_kind("table")[0].tensors[0]

    @property
    def head_units(self) -> list[Unit]:
        """The row chunks that the logits are computed from, tied or not."""
        return self.of_kind("table" if self.tied else "head")

    @property
    def has_cut_blocks(self) -> bool:
        """Whether any block has more than one unit."""
        return len(self.of_kind("block")) > self.block_count

    @cached_property
    def blocks_numel(self) -> int:
        """Elements of the units of all blocks."""
        return sum(unit.numel for unit in self.of_kind("block"))

    @cached_property
    def largest_block_unit(self) -> int:
        return max((unit.numel for unit in self.of_kind("block")), default=0)

    @cached_property
    def largest_with_gaps(self) -> int:
        """Elements of the largest block unit with padding between its tensors."""
        whole = [unit for unit in self.of_kind("block") if unit.rows is None]
        return max((u.numel for u in whole if sum(t.shape.numel() for t in u.tensors) < u.numel), default=0)

    @cached_property
    def matrices(self) -> Counter[torch.Size]:
        """The shapes of matrices of blocks (of a stack of experts: of one), each with how many tensors of units have
        it."""
        return Counter(t.matrix for unit in self.of_kind("block") for t in unit.tensors if len(t.shape) > 1)

    @property
    def widest(self) -> int:
        """The widest side of a matrix in a block; the width, if it has none."""
        return max((max(shape[-2:]) for shape in self.matrices), default=int(self.table.shape[1]))

    @cached_property
    def has_expert_units(self) -> bool:
        """Whether experts are units of their own."""
        return any(unit.expert is not None for unit in self.units)

    @cached_property
    def largest_unit_numel(self) -> int:
        return max(unit.numel for unit in self.units[1:])


def _runs(leaves: list[nn.Module], owned: set[int], max_numel: int | None) -> list[list[nn.Module]]:
    """Groups consecutive leaves into runs of at most max_numel elements; one run if max_numel is None."""
    runs: list[list[nn.Module]] = []
    size = 0
    for leaf in leaves:
        numel = sum(p.numel() for p in leaf.parameters() if id(p) in owned)
        if numel == 0:
            continue
        if not runs or (max_numel is not None and size + numel > max_numel):
            runs.append([])
            size = 0
        runs[-1].append(leaf)
        size += numel
    return runs


def find_layout(
    module: nn.Module,
    max_unit_numel: int | None = None,
    cut_rows: bool = True,
    cut_experts: bool = True,
    parts: Parts | None = None,
) -> Layout:
    """The layout of an HF decoder, which may be on the meta device: no weights are needed. max_unit_numel: blocks are
    cut into units of at most this many elements, or of one leaf (None: not cut). cut_rows: large matrices are then cut
    too; cut_experts: so are stacks of experts that are larger than a unit. parts: those of the module, if known."""
    of = find_parts(module) if parts is None else parts
    builder = _Builder(of)
    builder.unit("common", "common", of.common, [])
    if of.table is not None:
        builder.table("table", of.table)
    for i, block in enumerate(of.blocks):
        runs = _runs(of.leaves[i], of.in_blocks, max_unit_numel)
        for j, run in enumerate(runs):
            params = [p for leaf in run for p in leaf.parameters() if id(p) in of.in_blocks]
            name = f"block {i}" if len(runs) == 1 else f"block {i}.{j}"
            cuts = cut_experts and len(runs) > 1 and id(run[0]) in of.experts
            if cut_rows and len(runs) > 1 and len(run) == 1 and (tiles := row_tiles(run[0])):
                builder.rows("block", name, params[0], tiles)
            elif cuts and max_unit_numel is not None and sum(p.numel() for p in params) > max_unit_numel:
                for stack in params:
                    kind = of.names[id(stack)].rpartition(".")[2]
                    builder.rows("block", f"{name} {kind}", stack, [(e, e + 1) for e in range(stack.shape[0])])
            else:
                builder.unit("block", name, params, [block] if len(runs) == 1 else run)
    tied = of.head is of.table
    if of.head is not None and not tied:
        builder.table("head", of.head)
    experts = [*of.experts.values()]
    return Layout(builder.tensors, builder.units, builder.end, len(of.blocks), tied, experts, of)


class _Builder:
    """Places tensors one after the other, and forms units."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.expert_count = {id(stack): one.count for one in parts.experts.values() for stack in one.stacks}
        self.tensors: list[FlatTensor] = []
        self.units: list[Unit] = []
        self.end = 0

    def _place(self, param: nn.Parameter) -> FlatTensor:
        of_block, experts = self.parts.block_of.get(id(param)), self.expert_count.get(id(param), 0)
        tensor = FlatTensor(self.parts.names[id(param)], self.end, param.shape, param, of_block, experts)
        self.tensors.append(tensor)
        self.end = -(-tensor.stop // ALIGN) * ALIGN
        return tensor

    def unit(self, kind: str, name: str, params: list[nn.Parameter], modules: list[nn.Module]) -> None:
        start = self.end
        tensors = [self._place(p) for p in {id(p): p for p in params}.values()]
        block = tensors[0].block if kind == "block" else None
        self.units.append(Unit(len(self.units), name, kind, start, self.end, tensors, modules, block=block))

    def table(self, kind: str, param: nn.Parameter) -> None:
        chunks = range(0, param.shape[0], CHUNK_ROWS)
        self.rows(kind, kind, param, [(first, min(first + CHUNK_ROWS, param.shape[0])) for first in chunks])

    def rows(self, kind: str, name: str, param: nn.Parameter, ranges: list[tuple[int, int]]) -> None:
        """A matrix cut by rows, one unit per range; every unit but the last ends where the next begins."""
        tensor = self._place(param)
        row_count, width = param.shape[0], param.shape[1:].numel()
        for first, last in ranges:
            start = tensor.start + first * width
            stop = tensor.start + last * width if last < row_count else self.end
            title, rows = f"{name} rows {first}-{last}", (first, last)
            unit = Unit(len(self.units), title, kind, start, stop, [tensor], rows=rows, block=tensor.block)
            self.units.append(unit)
