"""What all layouts of a module have in common, however its blocks are cut into units (layout.py).

The planner tries several cuts of one module, so this is found once: blocks, the leaves in them (modules that own a
matrix), the parameters that belong to one leaf alone, stacks of experts, and the spine: what is in no block and no
table, and parameters that several leaves share.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from keyhole.model.structure.experts import Experts, expert_units, find_experts
from keyhole.model.structure.find import Stack, find_blocks, leaves_of, row_tiles, stacks_outside


@dataclass(frozen=True)
class Parts:
    """The parts of a module. large: how many leaves have a matrix that may be cut by rows."""

    module: nn.Module
    names: dict[int, str]
    table: nn.Parameter | None
    head: nn.Parameter | None
    blocks: list[nn.Module]
    leaves: list[list[nn.Module]]  # by block
    in_blocks: set[int]  # ids of parameters
    block_of: dict[int, int]
    experts: dict[int, Experts]
    spine: list[nn.Parameter]
    large: int
    outside: list[Stack]


def find_parts(module: nn.Module) -> Parts:
    """Blocks, leaves and spine of an HF decoder."""
    names = {id(p): name for name, p in module.named_parameters()}  # a tied parameter once, by its first name
    model: Any = module  # a class of Transformers
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    table_p: Any = embedding.weight if isinstance(embedding, nn.Embedding) else None
    head_p: Any = head.weight if isinstance(head, nn.Linear) else None
    blocks = find_blocks(module)
    tables = {id(p) for p in (table_p, head_p)}
    by_block = [leaves_of(block) for block in blocks]
    leaves = [leaf for of_block in by_block for leaf in of_block]
    uses = Counter(id(p) for leaf in leaves for p in leaf.parameters())
    large = [leaf for leaf in leaves if row_tiles(leaf)]
    candidates = leaves if expert_units(module) else []
    experts = {id(leaf): found for leaf in candidates if (found := find_experts(leaf))}
    outside = tables | {id(leaf.bias) for leaf in large}
    outside |= {id(bias) for found in experts.values() for bias in found.biases}
    in_blocks = {p for p, count in uses.items() if count == 1 and p not in outside}  # shared ones go to the spine
    experts = {key: one for key, one in experts.items() if all(id(stack) in in_blocks for stack in one.stacks)}
    spine = [p for p in module.parameters() if id(p) not in in_blocks and id(p) not in tables]
    block_of, stacks = _block_of(blocks, in_blocks), stacks_outside(module, blocks)
    return Parts(
        module, names, table_p, head_p, blocks, by_block, in_blocks, block_of, experts, spine, len(large), stacks
    )


def _block_of(blocks: list[nn.Module], in_blocks: set[int]) -> dict[int, int]:
    """id(parameter) -> the one block that uses it, if that block has units of its own."""
    by_block = [[id(p) for p in block.parameters()] for block in blocks]
    users = Counter(p for of_block in by_block for p in of_block)
    with_units = {i: of_block for i, of_block in enumerate(by_block) if not in_blocks.isdisjoint(of_block)}
    return {p: i for i, of_block in with_units.items() for p in of_block if users[p] == 1}
