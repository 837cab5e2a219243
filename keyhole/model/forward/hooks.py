"""Where the module's forward calls the engine: hooks, without any change of model code.

Without a conductor, a caller uses the module by itself: the hook on the embedding and those before its
`save_pretrained`, `state_dict` and `load_state_dict` make the model apply updates that its weights lack
(`used_directly`, `settle`), the others do nothing. With one, a pass that enters

    a module of a unit whose weights it does not hold    waits there until the unit is bound (`meet`)
    a block                                              points the spine's vectors in it to the pass's own copy;
                                                         block_at_once: it first waits for all units of the block
    the input embedding                                  looks up rows that were gathered where the table lives

Compiled code cannot stop inside a block: with block_at_once the hooks inside do nothing. Hooks hold a weak reference to
the model, because the model holds the module, and the module its hooks.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.layout import Unit


class RunningPass(Protocol):
    """The pass whose code is running."""

    index: int
    unit: Unit | None  # the unit whose weights it holds

    def meet(self, unit: Unit) -> None:
        """Returns when the unit is bound for this pass."""

    def will_meet(self, units: list[Unit]) -> None:
        """Announces the expert units that the pass will need next."""


class Conductor(Protocol):
    """Decides what parameters point to while passes run: lockstep.py for several passes, generate.py for one."""

    current: RunningPass
    block_at_once: bool  # a pass waits for all units of a block before it enters the block
    steady: bool  # a pass finds a unit's weights at the same address in every block

    def rows(self, index: int, ids_M: torch.Tensor) -> torch.Tensor:
        """[M, H] rows of the embedding for a pass."""


def install_hooks(model: Any) -> None:
    """Installs hooks on every module that needs a unit to be bound, every block, and the input embedding."""
    model_of = weakref.ref(model)

    def conductor_of() -> Conductor | None:
        owner = model_of()
        return None if owner is None else owner.conductor

    def on_enter(unit: Unit) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            if torch.compiler.is_compiling():  # the block's units were met before it was entered
                return
            conductor = conductor_of()
            current = None if conductor is None else conductor.current
            if conductor is not None and current and not conductor.block_at_once and current.unit is not unit:
                current.meet(unit)

        return hook

    def on_block(block: int, units: list[Unit]) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            if (conductor := conductor_of()) is None:
                return
            for unit in units if conductor.block_at_once else ():
                conductor.current.meet(unit)
            owner: Any = model_of()
            owner.binding.enter_block(block)

        return hook

    def on_embed(module: nn.Module, args: tuple) -> tuple | None:
        if (conductor := conductor_of()) is None:
            if not torch.compiler.is_compiling() and (owner := model_of()) is not None:
                owner.methods.used_directly("forward")
            return None
        ids = args[0]
        rows_MH = conductor.rows(conductor.current.index, ids.flatten())
        if isinstance(rows_MH, nn.Parameter):  # a leaf, for a pass that will be differentiated
            module._parameters["weight"] = rows_MH
        else:
            module.weight.data = rows_MH
        return (torch.arange(ids.numel(), device=ids.device).view(ids.shape),)

    def on_save() -> None:
        if (owner := model_of()) is not None:
            owner.methods.used_directly("save_pretrained")

    def on_state_dict() -> None:
        if (owner := model_of()) is not None:
            owner.methods.settle()

    blocks = model.layout.of_kind("block")
    for unit in blocks:
        for owner in unit.modules:
            model.patches.pre_hook(owner, on_enter(unit))
    for block, owner in enumerate(find_blocks(model.module)):  # after on_enter, so that the unit is already bound
        model.patches.pre_hook(owner, on_block(block, [u for u in blocks if u.block == block]))
    model.patches.pre_hook(model.embedding, on_embed)
    model.patches.before_saving(model.module, on_save)
    model.patches.before_state_dict(model.module, on_state_dict)
