"""Finds the parts of a decoder: its blocks, the modules in them that own matrices, and layers of special kinds.

Parts are found by their structure, not by the model's name: blocks are the list of modules that holds the most
parameters. Everything here works on the meta device, and depends only on the architecture.
"""

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


@dataclass(frozen=True)
class Stack:
    """A list of similar modules outside of the blocks."""

    name: str
    count: int
    kind: str
    numel: int


def stacks_outside(module: nn.Module, blocks: list[nn.Module]) -> list[Stack]:
    """The outermost lists of modules with matrices that belong to no block: a second stack, or a vision tower."""
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    found: list[Stack] = []
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            own = [p for p in child.parameters() if id(p) not in in_blocks]
            nested = any(name.startswith(f"{stack.name}.") for stack in found)
            if not nested and any(is_matrix(p) for p in own):
                found.append(Stack(name, len(child), type(child[0]).__name__, sum(p.numel() for p in own)))
    return found


def leaves_of(block: nn.Module) -> list[nn.Module]:
    """The outermost modules that own a matrix, or use one of a submodule directly. Each counts with all its children.
    Modules with only vectors (norms) do not count: they belong to the spine."""
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
