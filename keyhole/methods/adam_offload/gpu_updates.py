"""adam-offload's updates on the GPU: state is copied to the device, updated there, and copied back.

The CPU updates some 3 G parameters per second, and the link is idle meanwhile. So the GPU can update some parts of a
unit (lane.py). Bytes per parameter, in 16 bit:

    by the CPU    host memory 26 (state and gradient), link 4 up (the new master)
    by the GPU    host memory and link 14 up (state and gradient), 12 down (state), 14 if weights are streamed

The split is dynamic: each takes the most urgent part when it is free (offload/workers.py). The split may differ from
run to run, so the bits must not depend on it: ops/adam/device.py rounds like the CPU's kernel, and is compared with it
at the start. If the bits differ, or memory cannot be page-locked, the CPU updates everything.
"""

from collections.abc import Callable
from typing import Any

import torch

from keyhole.methods.adam_offload.exchange import Exchange
from keyhole.methods.adam_offload.lane import Lane, chunk_of
from keyhole.methods.adam_offload.state import PART, AdamState, Part
from keyhole.model.structure.layout import Unit
from keyhole.offload import arena
from keyhole.ops.adam import adamw_, host_adamw_, squares_of_host
from keyhole.ops.backend import use_kernel


class AdamLane:
    """Updates parts of units on the engine's device. Made by `open_lane`."""

    def __init__(self, state: AdamState, exchange: Exchange, dtype: torch.dtype, squares: str | None) -> None:
        self.state, self.exchange, self.engine, self.squares = state, exchange, exchange.engine, squares
        engine = exchange.engine
        chunk = chunk_of(min(PART, max(unit.numel for unit in state.units)))
        self.lane = Lane([torch.float32] * 3 + [dtype], engine.device, chunk)
        self.scratch = torch.empty(0 if engine.cuda else chunk)
        self.share = 0.0  # share of all trained parameters that the GPU updated in the last step
        self._numel = self._up = self._down = 0  # parameters updated and bytes moved since the last `settle`

    def update(self, unit: Unit, part: Part, page: torch.Tensor, lr: float, clip: float) -> Callable[[], None]:
        """Starts the update of a part from its gradient in `page`; returns a function that waits for its end. New
        weights go to the device's copy, or to `page` if the unit is streamed."""
        streamed = unit.index in self.engine.on_host
        home = None if streamed else self.exchange.kept(unit.index).data[part.begin : part.end]
        how: dict[str, Any]
        how = {"step": part.step, "lr": lr, "clip": clip, "weight_decay": part.weight_decay, **self.state.rule}

        by_gpu: Any = adamw_
        by_host: Any = host_adamw_

        def change(begin: int, chunks: list[torch.Tensor]) -> None:
            weight = chunks[3] if home is None else home[begin : begin + chunks[3].numel()]
            if self.engine.cuda:
                by_gpu(*chunks, weight, squares=self.squares, **how)
            else:
                by_host(*chunks, weight, scratch=self.scratch, **how)

        tensors = [*self.state.of(unit, part.begin, part.end), page[part.begin : part.end]]
        self._count(tensors, streamed)
        return self.lane.run(tensors, back=4 if streamed else 3, change=change)

    def _count(self, tensors: list[torch.Tensor], streamed: bool) -> None:
        numel, element = tensors[0].numel(), tensors[3].element_size()
        self._numel += numel
        self._up += numel * (12 + element - (0 if streamed else 4))  # the exchange has already counted a master
        self._down += numel * (12 + (element if streamed else 0))

    def settle(self) -> None:
        """Adds up the counts of a step, once. Called by the engine's thread while no update runs."""
        self.engine.bytes_up += self._up
        self.engine.bytes_down += self._down
        self.share = self._numel / max(1, self.state.trained_numel)
        self._numel = self._up = self._down = 0


def open_lane(state: AdamState, exchange: Exchange, dtype: torch.dtype) -> tuple[AdamLane | None, str]:
    """The lane or None, and the reason in words."""
    engine = exchange.engine
    if not engine.cuda:
        return AdamLane(state, exchange, dtype, None), "the device updates a part of them"
    if not use_kernel(engine.device):
        return None, "the GPU cannot help: Triton is missing"
    squares = squares_of_host(engine.device, state.rule)
    if squares is None:
        return None, "the GPU cannot help: this build of torch rounds AdamW in a way that is not known here"
    if not all(arena.pin(arena.storage_of(flat), engine.device) for flat in state.flats):
        for flat in state.flats:
            arena.unpin(arena.storage_of(flat))
        return None, "the GPU cannot help: the state in host memory could not be page-locked"
    return AdamLane(state, exchange, dtype, squares), "the GPU updates what it can meanwhile, in the same bits"
