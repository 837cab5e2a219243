"""Finds stacks of experts whose layer can be computed one expert at a time.

A mixture-of-experts layer keeps the matrices of all its experts in two stacks, [E, rows, columns] each: an up
projection (gate and up together, or up alone) and a down projection. Transformers marks such a module (by its decorator
`use_experts_implementation`) and describes its computation in attributes:

    has_gate         the upper stack is gate_up_proj, and `_apply_gate` follows; else it is up_proj, and `act_fn` does
    has_bias         each stack has a bias [E, columns] of its own
    is_transposed    a matrix of a stack is [inputs, outputs], not [outputs, inputs]

A stack is one tensor of its checkpoint, but tokens use single experts, and only those must be on the device. So if the
stacks are large, every expert is computed, moved and updated as a matrix of its own (model/forward/experts.py). This
depends only on the architecture, never on where weights live, so that the bits do not either. Transformers' own code
computes stacks of at most STACK_NUMEL elements, modules with a norm of their own behind each expert, and mixtures that
are built in another way (Llama 4, DBRX, JetMoE).
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

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
    if not is_marked(module) or getattr(module, "has_post_expert_norm", False):  # attribute is newer than 5.17
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


def is_marked(module: nn.Module) -> bool:
    """Whether Transformers has marked the module as a stack of experts."""
    return all(hasattr(module, mark) for mark in MARKS)


def expert_units(module: nn.Module) -> bool:
    """Whether the model's large stacks are computed one expert at a time; set when it is built (skeleton.py)."""
    return bool(getattr(module, "keyhole_expert_units", True))
