"""A rule for the matrices of blocks, and AdamW for everything else, with moments in host memory: muon and apollo-mini.

    matrices of blocks             the rule of the subclass; in a stack of experts, of each by itself
    table, head, vectors, others   AdamW

Embedding and head have up to half of a model's parameters, and two moments each: too much for the device. So the state
of a unit is a page of an engine of its own (methods/states.py), wherever the weights live: it is uploaded before the
unit's gradients come, changed on the device, and written back. A streamed run has the bits of a resident one.

Bytes: pages in host memory, and as many up and down the link per step; on the device the largest page times the slots,
and PER_ELEMENT for each element of a piece: AdamW computes in float32, PIECE elements at a time.

On several ranks each has all pages and makes the same update in its slot (update.py).
"""

from abc import abstractmethod
from bisect import bisect_right
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from keyhole import ops
from keyhole.methods.base import Saved, State
from keyhole.methods.lomo.update import Update
from keyhole.methods.settings import AdamSettings
from keyhole.methods.states import PLACES, Format, StatePages
from keyhole.model.backward.sink import tensors_of
from keyhole.model.structure.layout import FlatTensor, Layout, Unit

ALIGN = 64  # elements
PIECE, PER_ELEMENT = 2**21, 24
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Kept:
    """What a tensor keeps: arrays by name, in the page of its unit, from `begin` on, `padded` elements each."""

    tensor: FlatTensor
    unit: int
    names: tuple[str, ...]
    begin: int
    padded: int

    @property
    def end(self) -> int:
        return self.begin + len(self.names) * self.padded

    def of(self, page: torch.Tensor, part: FlatTensor) -> dict[str, torch.Tensor]:
        """The arrays of the tensor, or of one expert of a stack, as views of the page."""
        first = self.begin + part.start - self.tensor.start
        begins = {name: first + i * self.padded for i, name in enumerate(self.names)}
        return {name: page[at : at + part.shape.numel()].view(part.shape) for name, at in begins.items()}


def kept_in(unit: Unit, of_matrix: tuple[str, ...]) -> list[Kept]:
    """The content of a unit's page. of_matrix: what a matrix of a block keeps."""
    found: list[Kept] = []
    for tensor in (tensor for tensor in tensors_of(unit) if tensor.param.requires_grad):
        names, padded = of_matrix if tensor.in_matrices else MOMENTS, -(-tensor.shape.numel() // ALIGN) * ALIGN
        found.append(Kept(tensor, unit.index, names, found[-1].end if found else 0, padded))
    return found


def page_numels(layout: Layout, of_matrix: tuple[str, ...]) -> dict[int, int]:
    """The length of each unit's page, in numbers."""
    pages = {unit.index: kept_in(unit, of_matrix) for unit in layout.units}
    return {unit: page[-1].end if page else 0 for unit, page in pages.items()}


def device_state(numels: dict[int, int], format: Format, slots: int) -> int:
    """Bytes on the device."""
    largest = max(numels.values())
    return int(slots * format.bytes * largest) + PER_ELEMENT * min(PIECE, largest)


class AdamPages(Update):
    """AdamW, the pages, and how they are saved."""

    whole_tensors = True
    of_matrix: tuple[str, ...] = ()  # what a matrix of a block keeps in its page
    # eps is added to the root of the second moment before this is corrected for its start at 0; else after it.
    eps_first = False

    def __init__(self, *args: Any, format: Format, slots: int) -> None:
        super().__init__(*args)
        layout = self.model.layout
        self.format = format
        self.pages = StatePages(page_numels(layout, self.of_matrix), format, self.model.device, slots)
        self.updates: dict[str, int] = {}  # of a tensor; fewer than steps if it was frozen, or had no gradient
        content = (kept for unit in layout.units for kept in kept_in(unit, self.of_matrix))
        self.content = sorted(content, key=lambda kept: kept.tensor.start)
        self.starts = [kept.tensor.start for kept in self.content]

    def applying(self) -> AbstractContextManager[None]:
        units = [unit for unit in self.model.layout.units if unit.index in self.pages.units]
        order = [u.index for u in reversed(units) if u.kind not in ("common", "table")]
        order += [u.index for u in units if u.kind == "table"] + [u.index for u in units if u.kind == "common"]
        return self.pages.sweep(order)

    def paged(self, tensor: FlatTensor) -> dict[str, torch.Tensor]:
        """What a tensor keeps, on the device."""
        kept = self.content[bisect_right(self.starts, tensor.start) - 1]
        return kept.of(self.pages.acquire(kept.unit), tensor)

    def rule(
        self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, lr: float, decay: float, how: dict[str, Any]
    ) -> None:
        if (total := how.pop("sum_squares")) is not None:  # of the unscaled gradient
            ops.sum_squares_(grad, total, self.scale, how["bad"], offset=tensor.start)
        count = self.updates[tensor.name] = self.updates.get(tensor.name, 0) + 1
        if tensor.in_matrices:
            step, factor, scale = self.of_a_matrix(tensor, grad, count)
            ops.sgd_update_(w, step, lr=lr * factor, weight_decay=decay / factor, scale=scale, **how)
            return
        (m, v), lost = self.paged(tensor).values(), how.pop("compensation")
        for begin in range(0, grad.numel(), PIECE):
            part = slice(begin, begin + PIECE)
            how |= {"offset": tensor.start + begin, "compensation": None if lost is None else lost.view(-1)[part]}
            step = self._adam(*(one.view(-1)[part] for one in (m, v, grad)), count, tensor.start + begin)
            ops.sgd_update_(w.view(-1)[part], step, lr=lr, weight_decay=decay, **how)

    @abstractmethod
    def of_a_matrix(
        self, tensor: FlatTensor, grad: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, float, torch.Tensor | None]:
        """The step of a matrix of a block: a tensor, and the factors of the rate and, on the device, of the tensor.
        count: of its updates, with this one."""

    def _adam(self, m: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, count: int, start: int) -> torch.Tensor:
        """AdamW's step of a piece of a tensor; updates its moments."""
        own, place = self.own, start + PLACES
        assert isinstance(own, AdamSettings)
        grad = grad.float() * self.scale
        self.format.lerp_(m, grad, 1 - own.beta1, (place, own.seed, self.now.step))
        self.format.lerp_(v, grad.square(), 1 - own.beta2, (place + PLACES, own.seed, self.now.step))
        corrected = (1 - own.beta2**count) ** 0.5
        root = v.float().sqrt().div_(corrected).add_(own.eps / corrected if self.eps_first else own.eps)
        return (m.float() / root).div_(1 - own.beta1**count)

    def finished(self, unit: Unit) -> bool:
        self.pages.release(unit.index)
        return super().finished(unit)

    def describe(self) -> list[str]:
        size, bits = self.pages.bytes / 2**30, 8 * self.format.dtype.itemsize
        return [f"state: {size:.2f} GiB in host memory, {bits} bits a number, on its way with each unit"]

    # -- state -------------------------------------------------------------------------------------------------------

    def _views(self) -> dict[str, torch.Tensor]:
        """What is in the pages by tensor (a chunk of a table is one of its own), as views of host memory."""
        self.pages.wait()
        found = ((kept, kept.of(self.pages.homes[kept.unit], kept.tensor)) for kept in self.content)
        return {f"{kept.tensor.name}/{name}": array for kept, arrays in found for name, array in arrays.items()}

    def state(self) -> State:
        counts = {f"{name}/updates": count for name, count in self.updates.items()}
        return super().state() | self._views() | counts

    def load(self, state: Saved, step: int) -> None:
        super().load(state, step)
        for name, home in self._views().items():
            home.copy_(state[name])
        self.pages.engine.invalidate()
        names = [name for name in state if name.endswith("/updates")]
        self.updates = {name.removesuffix("/updates"): int(state[name]) for name in names}
