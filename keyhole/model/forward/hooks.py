"""Where an ordinary forward of the module meets the engine: hooks, and not a line of model code rewritten.

Without a conductor (lockstep.py, generate.py) they do nothing. With one,

    a module of a unit that the pass does not hold    the pass waits there until the unit is bound (`meet`)
    a block                                           the spine's vectors in it are pointed to where this pass has them;
                                                      whole: all units of the block are met here, at its door
    the input embedding                               looks up rows that were gathered where the table lives

Compiled code cannot stop inside a block, so there units are met at the door and the hooks inside say nothing.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.layout import Unit


class Conductor(Protocol):
    """Who decides what parameters point to while passes run: lockstep.py, or generate.py for one pass."""

    current: Any  # the pass that runs: its index, the unit it holds (wants), and meet(unit)
    whole: bool  # passes meet all units of a block at its door
    steady: bool  # a pass finds a unit's weights at the same address in every block

    def rows(self, index: int, ids_M: torch.Tensor) -> torch.Tensor:
        """[M, H] rows of the embedding for a pass."""


def install_hooks(model: Any) -> None:
    """On every module that needs a unit to be bound, every block, and the input embedding."""

    def on_enter(unit: Unit) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            if torch.compiler.is_compiling():  # met at the door
                return
            current = model.conductor and model.conductor.current
            if current and not model.conductor.whole and current.wants is not unit:
                current.meet(unit)

        return hook

    def on_block(block: int, units: list[Unit]) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            if model.conductor is None:
                return
            for unit in units if model.conductor.whole else ():
                model.conductor.current.meet(unit)
            model.binding.enter_block(block)

        return hook

    def on_embed(module: nn.Module, args: tuple) -> tuple | None:
        if model.conductor is None:
            return None
        ids = args[0]
        rows_MH = model.conductor.rows(model.conductor.current.index, ids.flatten())
        if isinstance(rows_MH, nn.Parameter):  # a leaf of its own, for a pass that will be differentiated
            module._parameters["weight"] = rows_MH
        else:
            module.weight.data = rows_MH
        return (torch.arange(ids.numel(), device=ids.device).view(ids.shape),)

    blocks = model.layout.of_kind("block")
    for unit in blocks:
        for owner in unit.modules:
            owner.register_forward_pre_hook(on_enter(unit))
    for block, owner in enumerate(find_blocks(model.module)):  # after on_enter: the unit's pass is bound by then
        owner.register_forward_pre_hook(on_block(block, [u for u in blocks if u.block == block]))
    model.embedding.register_forward_pre_hook(on_embed)
