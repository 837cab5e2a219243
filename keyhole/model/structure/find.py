"""Finds the parts of a decoder: blocks, the modules in them that own matrices, stacks of experts, and the common unit.

Parts are found by their structure, not by the model's name: blocks are the list of modules that holds the most
parameters. Everything here works on the meta device, and depends only on the architecture. What all layouts of a module
have in common (layout.py), however its blocks are cut into units, is found once (`find_parts`): the planner tries
several cuts.

In a mixture of experts, a router sends each token to a few of many small MLPs, the experts. Transformers stores all
experts of a layer in two stacks, [E, out, in], marks the module (by its decorator `use_experts_implementation`) and
describes its computation in attributes:

    has_gate         the upper stack is gate_up_proj, and `_apply_gate` follows; else it is up_proj, and `act_fn` does
    has_bias         each stack has a bias [E, columns] of its own
    is_transposed    a matrix of a stack is [inputs, outputs], not [outputs, inputs]

A stack is one tensor of its checkpoint, but tokens use single experts, and only those must be on the device. So if the
stacks are large, every expert is computed, moved and updated as a matrix of its own (model/forward/pieces.py). This
depends only on the architecture, never on where weights live, so that the bits do not either. Transformers' own code
computes stacks of at most STACK_NUMEL elements, modules with a norm of their own behind each expert, and mixtures that
are built in another way (Llama 4, DBRX, JetMoE).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from keyhole.model.structure.reach import is_matrix, is_unreached, reads_inside

TILE_NUMEL = 160 * 2**20
TILE_ROWS = 256  # tiles are a multiple of this


def find_decoder(module: nn.Module) -> nn.Module:
    """The module that the causal LM calls for hidden states; it holds the input embedding. If Transformers' own lookup
    returns the LM itself (Llama 4) or something else (the head of ModernBERT), the child that holds the embedding."""
    model: Any = module  # a class of Transformers
    embedding = model.get_input_embeddings()

    def holds_embedding(part: nn.Module) -> bool:
        return part is not embedding and any(inside is embedding for inside in part.modules())

    decoder: nn.Module = model.get_decoder()
    return (
        decoder
        if decoder is not module and holds_embedding(decoder)
        else next(filter(holds_embedding, module.children()))
    )


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks: the outermost list of modules that holds the most parameters that a forward pass on tokens
    uses; [] if there is none. A list within it is not called itself: its modules are."""
    best, best_numel = [], 0
    for child in module.modules():  # outermost first, so that a tie goes to the outer list
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            numel = sum(p.numel() for p in child.parameters() if not is_unreached(p))
            if numel > best_numel:
                best, best_numel = _called(child), numel
    return best


def _called(modules: nn.ModuleList) -> list[nn.Module]:
    nested = ([one] if not isinstance(one, nn.ModuleList) else _called(one) for one in modules)
    return [one for several in nested for one in several]


def stacks_outside(module: nn.Module, blocks: list[nn.Module]) -> dict[str, tuple[nn.ModuleList, int]]:
    """The outermost lists of modules with matrices that belong to no block: a second stack, or a vision tower. By name,
    each with how many of its parameters do."""
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    found: dict[str, tuple[nn.ModuleList, int]] = {}
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            own = [p for p in child.parameters() if id(p) not in in_blocks]
            nested = any(name.startswith(f"{outer}.") for outer in found)
            if not nested and any(is_matrix(p) for p in own):
                found[name] = child, sum(p.numel() for p in own)
    return found


def leaves_of(block: nn.Module) -> list[nn.Module]:
    """The outermost modules that own a matrix, or use one of a submodule directly. Each counts with all its children.
    Modules with only vectors (norms) do not count: they belong to the common unit."""
    if any(p is not None and is_matrix(p) for p in block._parameters.values()) or reads_inside(block):
        return [block]
    return [leaf for child in block.children() for leaf in leaves_of(child)]


def row_tiles(leaf: nn.Module) -> list[tuple[int, int]]:
    """Row ranges of a linear layer with a large matrix, as even as TILE_ROWS allows; [] for any other module. They
    depend only on the shape, so that streamed and resident models compute the same products."""
    if type(leaf) is not nn.Linear or leaf.weight.numel() <= TILE_NUMEL:
        return []
    row_count = leaf.weight.shape[0]
    even = -(-row_count // -(-leaf.weight.numel() // TILE_NUMEL))
    step = -(-even // TILE_ROWS) * TILE_ROWS
    tiles = [(first, min(first + step, row_count)) for first in range(0, row_count, step)]
    return tiles if len(tiles) > 1 else []


STACK_NUMEL = 64 * 2**20
MARKS = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "num_experts")


@dataclass(frozen=True)
class Experts:
    """A module of experts: the names of its stacks, in the order of use."""

    module: nn.Module
    up_name: str
    down_name: str = "down_proj"

    @property
    def count(self) -> int:
        count: Any = self.module.num_experts
        return int(count)

    @property
    def stacks(self) -> tuple[nn.Parameter, nn.Parameter]:
        return getattr(self.module, self.up_name), getattr(self.module, self.down_name)

    @property
    def biases(self) -> tuple[nn.Parameter, ...]:
        names = (f"{self.up_name}_bias", f"{self.down_name}_bias") if self.module.has_bias else ()
        return tuple(getattr(self.module, name) for name in names)


def find_experts(module: nn.Module) -> Experts | None:
    """The stacks of a module that is computed one expert at a time; None for other modules."""
    marked = all(hasattr(module, mark) for mark in MARKS)
    if not marked or getattr(module, "has_post_expert_norm", False):  # attribute is newer than 5.17
        return None
    found = Experts(module, "gate_up_proj" if module.has_gate else "up_proj")
    own = module._parameters
    names = [found.up_name, found.down_name]
    names += [f"{name}_bias" for name in names] if module.has_bias else []
    if (
        set(own) != set(names)
        or any(own[name] is None for name in names)
        or any(True for child in module.children() for _ in child.parameters())
    ):
        return None
    fits = all(stack.dim() == 3 and stack.shape[0] == found.count > 1 for stack in found.stacks)
    return found if fits and max(stack.numel() for stack in found.stacks) > STACK_NUMEL else None


@dataclass(frozen=True)
class Parts:
    """The parts of a module. tiled_layers: how many leaves have a matrix that may be cut by rows."""

    module: nn.Module
    names: dict[int, str]
    table: nn.Parameter | None
    head: nn.Parameter | None
    blocks: list[nn.Module]
    leaves: list[list[nn.Module]]  # by block
    in_blocks: set[int]  # ids of parameters
    block_of: dict[int, int]  # id(parameter) -> the one block that uses it, if that block has units of its own
    experts: dict[int, Experts]
    common: list[nn.Parameter]
    tiled_layers: int


def find_parts(module: nn.Module) -> Parts:
    """Blocks, leaves and common of an HF decoder."""
    names = {id(p): name for name, p in module.named_parameters()}  # a tied parameter once, by its first name
    model: Any = module  # a class of Transformers
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    table_p: Any = embedding.weight if isinstance(embedding, nn.Embedding) else None
    head_p: Any = head.weight if isinstance(head, nn.Linear) else None
    blocks = find_blocks(module)
    tables = {id(p) for p in (table_p, head_p)}
    own_leaves = [leaves_of(block) for block in blocks]
    leaves = [leaf for of_block in own_leaves for leaf in of_block]
    uses = Counter(id(p) for leaf in leaves for p in leaf.parameters())
    large = [leaf for leaf in leaves if row_tiles(leaf)]
    by_expert = vars(module).get("keyhole_expert_units", True)  # set when it is built (skeleton.py)
    experts = {id(leaf): found for leaf in leaves if by_expert and (found := find_experts(leaf))}
    outside = tables | {id(leaf.bias) for leaf in large}
    outside |= {id(bias) for found in experts.values() for bias in found.biases}
    in_blocks = {p for p, count in uses.items() if count == 1 and p not in outside}  # shared ones go to the common unit
    experts = {key: one for key, one in experts.items() if all(id(stack) in in_blocks for stack in one.stacks)}
    common = [p for p in module.parameters() if id(p) not in in_blocks and id(p) not in tables]
    by_block = [[id(p) for p in block.parameters()] for block in blocks]
    users = Counter(p for of_block in by_block for p in of_block)
    with_units = {i: of_block for i, of_block in enumerate(by_block) if not in_blocks.isdisjoint(of_block)}
    block_of = {p: i for i, of_block in with_units.items() for p in of_block if users[p] == 1}
    return Parts(module, names, table_p, head_p, blocks, own_leaves, in_blocks, block_of, experts, common, len(large))
