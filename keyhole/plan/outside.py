"""Lines for the start block about the parts of a model outside of its blocks: further stacks and towers, unused parts.

The weights of a stack outside of the blocks belong to the spine, which is always on the device. So a model that
consists mostly of such stacks cannot be streamed, and the start block says so.
"""

import re

from torch import nn

from keyhole.model.structure.layout import Layout
from keyhole.model.structure.reach import is_unreached

MOST_NAMED = 4


def outside_lines(module: nn.Module, layout: Layout) -> list[str]:
    """A line for each stack outside of the blocks, and one for weights that are frozen because the forward pass on
    tokens does not use them."""
    total = sum(tensor.shape.numel() for tensor in layout.tensors)
    lines = [
        f"outside of the blocks: {stack.name}, {stack.count} x {stack.kind}, {stack.numel / total:.1%} of the "
        "parameters: on the device all the time, not streamed"
        for stack in layout.stacks_outside
    ]
    frozen = [tensor for tensor in layout.tensors if is_unreached(tensor.param)]
    if frozen:
        numel = sum(tensor.shape.numel() for tensor in frozen)
        lines.append(
            f"frozen: {numel:,} parameters ({numel / total:.1%}) that a batch of tokens never reaches: "
            + _parts({t.name for t in frozen}, {t.name for t in layout.tensors if not is_unreached(t.param)})
        )
    if untried := getattr(module, "keyhole_untried", ""):
        lines.append(f"all parameters count as used: a forward without weights, which would tell, fails ({untried})")
    return lines


def _parts(frozen: set[str], reached: set[str]) -> str:
    """The outermost modules with only frozen parameters; `*` stands for numbers."""
    prefixes = {name[:end] for name in reached for end in range(len(name)) if name[end] == "."}
    parts: dict[str, None] = {}
    for name in sorted(frozen):
        steps = name.split(".")
        outermost = next(
            (".".join(steps[:n]) for n in range(1, len(steps)) if ".".join(steps[:n]) not in prefixes), name
        )
        parts[re.sub(r"(?<=\.)\d+(?=\.|$)", "*", outermost)] = None
    named = list(parts)
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return ", ".join(named[:MOST_NAMED]) + more
