"""Objects that a model passes to all of its blocks, in which a block may leave tensors for later ones.

a mapping         its entries are inputs of a block, and what the block writes into it are outputs (tape.py). A block
                  gets a copy, in every run: the class and its attributes stay, the entries are those of its inputs
another object    tensors in its attributes would pass the cut between two blocks unseen, and lose their gradients;
                  a block that leaves some there is refused
"""

import copy
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from keyhole.errors import UserError

WHOLE = "use zo, or a baseline (adamw, sgd), which differentiates the model as a whole"


@dataclass(frozen=True)
class MappingPlace:
    """Stands for a mapping among the arguments of a block."""

    index: int


KNOWN = torch.Tensor | None | bool | int | float | str | torch.dtype | torch.device | MappingPlace
"""Arguments of a block that no block can leave a tensor in."""


def copied(mapping: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """A copy with a store of its own: classes that keep their entries in an attribute share it with a plain copy."""
    found = copy.copy(mapping)
    attributes = vars(found) if hasattr(found, "__dict__") else {}
    attributes.update({name: copy.copy(x) for name, x in attributes.items() if isinstance(x, MutableMapping)})
    return found


def emptied(mapping: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """A mapping of the same class and attributes, without entries."""
    found, entries = copied(mapping), dict(mapping)
    found.clear()
    if len(mapping) != len(entries):
        mapping.update(entries)
        raise UserError(
            f"model: its blocks hand tensors to each other in a mapping ({type(mapping).__name__}) that shares its "
            f"entries with its copies; {WHOLE}"
        )
    return found


def held_tensors(objects: list[Any]) -> list[torch.Tensor]:
    """Tensors that may have gradients (not masks or positions) in the attributes of these objects, and in lists and
    dicts there."""
    attributes = [dict(vars(value)) for value in objects if hasattr(value, "__dict__")]
    leaves = (leaf for one in attributes for leaf in tree_flatten(one)[0])
    return [x for x in leaves if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())]


def refuse_new_tensors(objects: list[Any], before: list[torch.Tensor]) -> None:
    """UserError if a block has left tensors in these objects, which held `before` when it began."""
    known = {id(tensor) for tensor in before}
    if any(id(tensor) not in known for tensor in held_tensors(objects)):
        kinds = ", ".join(sorted({type(value).__name__ for value in objects}))
        raise UserError(
            f"model: its blocks hand tensors to each other in an object ({kinds}) that keyhole cannot differentiate "
            f"through, block by block; {WHOLE}"
        )
