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
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from keyhole import ops
from keyhole.machine.sizes import GIB
from keyhole.methods.base import Saved, State
from keyhole.methods.lomo.traits import LOMOSettings
from keyhole.methods.lomo.update import Update
from keyhole.methods.settings import AdamSettings, MethodSettings
from keyhole.methods.states import FORMATS, PLACES, Format, StatePages
from keyhole.methods.work import check_host_memory
from keyhole.methods.workload import Room, Workload
from keyhole.model.backward.sink import tensors_of
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Layout, Unit

ALIGN = 64  # elements
PIECE, PER_ELEMENT = 2**21, 24
MOMENTS, UPDATES = ("exp_avg", "exp_avg_sq"), "updates"


@dataclass(frozen=True)
class Kept:
    """What a tensor keeps: arrays by name, in the page of its unit, from `begin` on, `padded` elements each."""

    tensor: FlatTensor
    unit: int
    names: tuple[str, ...]
    begin: int
    padded: int

    def of(self, page: torch.Tensor, part: FlatTensor) -> dict[str, torch.Tensor]:
        """The arrays of the tensor, or of one expert of a stack, as views of the page."""
        first, numel = self.begin + part.start - self.tensor.start, part.shape.numel()
        return {n: page[first + i * self.padded :][:numel].view(part.shape) for i, n in enumerate(self.names)}


def kept_in(unit: Unit, of_matrix: tuple[str, ...]) -> list[Kept]:
    """The content of a unit's page. of_matrix: what a matrix of a block keeps."""
    found, begin = list[Kept](), 0
    for tensor in (tensor for tensor in tensors_of(unit) if tensor.param.requires_grad):
        names, padded = of_matrix if tensor.in_matrices else MOMENTS, -(-tensor.shape.numel() // ALIGN) * ALIGN
        found.append(Kept(tensor, unit.index, names, begin, padded))
        begin += len(names) * padded
    return found


def page_numels(layout: Layout, of_matrix: tuple[str, ...]) -> dict[int, int]:
    """The length of each unit's page, in numbers."""
    return {unit.index: sum(len(k.names) * k.padded for k in kept_in(unit, of_matrix)) for unit in layout.units}


@dataclass(frozen=True)
class Paging:
    """What a method keeps in pages, in its words and bytes: a matrix of a block arrays of these names, the rest two
    moments; slots: pages that are on the device at a time. The format is the setting `moments`; without such a setting
    that of the model, whose 16-bit formats are bfloat16 here."""

    name: str
    settings: type[MethodSettings]
    of_matrix: tuple[str, ...]
    slots: Callable[[Layout], int]

    def format(self, own: MethodSettings | None, element_bytes: int) -> Format:
        return FORMATS[vars(own or self.settings()).get("moments", "float32" if element_bytes == 4 else "bfloat16")]

    def host_state(
        self,
        layout: Layout,
        streamed: set[int],
        element_bytes: int,
        own: MethodSettings | None = None,
        cut: dict[int, tuple[int, int]] | None = None,
    ) -> tuple[str, int]:
        """What is kept in host memory, in words and bytes. Every rank has all of it."""
        state = int(self.format(own, element_bytes).bytes * sum(page_numels(layout, self.of_matrix).values()))
        less = " (half: {}.moments=bfloat16)" if vars(own or self).get("moments") == "float32" else ""
        return f"{self.name} keeps {state / GIB:.1f} GiB of state{less.format(self.name)}", state

    def on_device(self, layout: Layout, work: Workload, room: Room) -> int:
        """Bytes on the device."""
        largest = max(page_numels(layout, self.of_matrix).values())
        number = self.format(work.settings, room.formats.dtype.itemsize).bytes
        return int(self.slots(layout) * number * largest) + PER_ELEMENT * min(PIECE, largest)

    def work(self, layout: Layout, work: Workload, room: Room) -> dict[str, float]:
        """What the pages add to the work of a step."""
        _, state = self.host_state(layout, set(), room.formats.dtype.itemsize, work.settings)
        return {"touched": 2 * state, **dict.fromkeys(("up", "down", "host_bytes", "saved_bytes"), state)}


class AdamPages(Update):
    """AdamW, the pages, and how they are saved."""

    whole_tensors = True
    paging: Paging
    # eps is added to the root of the second moment before this is corrected for its start at 0; else after it.
    eps_first = False

    def __init__(self, model: Model, own: LOMOSettings, *args: Any) -> None:
        layout, element_bytes = model.layout, model.dtype.itemsize
        check_host_memory(*self.paging.host_state(layout, set(), element_bytes, own))
        super().__init__(model, own, *args)
        of_matrix, self.format = self.paging.of_matrix, self.paging.format(own, element_bytes)
        self.pages = StatePages(page_numels(layout, of_matrix), self.format, model.device, self.paging.slots(layout))
        self.updates: dict[str, int] = {}  # of a tensor; fewer than steps if it was frozen, or had no gradient
        content = (kept for unit in layout.units for kept in kept_in(unit, of_matrix))
        self.content = sorted(content, key=lambda kept: kept.tensor.start)
        self.starts = [kept.tensor.start for kept in self.content]

    def applying(self) -> AbstractContextManager[None]:
        units = [unit for unit in self.model.layout.units if unit.index in self.pages.units]
        units.sort(key=lambda u: (u.kind == "common", u.kind == "table", u.index if u.kind == "table" else -u.index))
        return self.pages.sweep([unit.index for unit in units])

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
            step = self._adam(m.view(-1)[part], v.view(-1)[part], grad.view(-1)[part], count, how["offset"] + PLACES)
            ops.sgd_update_(w.view(-1)[part], step, lr=lr, weight_decay=decay, **how)

    @abstractmethod
    def of_a_matrix(
        self, tensor: FlatTensor, grad: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, float, torch.Tensor | None]:
        """The step of a matrix of a block: a tensor, and the factors of the rate and, on the device, of the tensor.
        count: of its updates, with this one."""

    def _adam(self, m: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, count: int, place: int) -> torch.Tensor:
        """AdamW's step of a piece of a tensor; updates its moments."""
        own, grad = self.own, grad.float() * self.scale
        assert isinstance(own, AdamSettings)
        self.format.lerp_(m, grad, 1 - own.beta1, (place, own.seed, self.now.step))
        self.format.lerp_(v, grad.square(), 1 - own.beta2, (place + PLACES, own.seed, self.now.step))
        corrected = (1 - own.beta2**count) ** 0.5
        root = v.float().sqrt().div_(corrected).add_(own.eps / corrected if self.eps_first else own.eps)
        return (m.float() / root).div_(1 - own.beta1**count)

    def finished(self, unit: Unit) -> bool:
        self.pages.release(unit.index)
        return super().finished(unit)

    def describe(self) -> list[str]:
        how = f"{8 * self.format.dtype.itemsize} bits a number, on its way with each unit"
        return [f"state: {self.pages.bytes / GIB:.2f} GiB in host memory, {how}"]

    # -- state -------------------------------------------------------------------------------------------------------

    def _views(self) -> dict[str, torch.Tensor]:
        """What is in the pages by tensor (a chunk of a table is one of its own), as views of host memory."""
        self.pages.wait()
        found = ((kept, kept.of(self.pages.homes[kept.unit], kept.tensor)) for kept in self.content)
        return {f"{kept.tensor.name}/{name}": array for kept, arrays in found for name, array in arrays.items()}

    def state(self) -> State:
        return super().state() | self._views() | {f"{name}/{UPDATES}": n for name, n in self.updates.items()}

    def load(self, state: Saved, step: int) -> None:
        super().load(state, step)
        for name, home in self._views().items():
            home.copy_(state[name])
        self.pages.engine.invalidate()
        counts = ((name.rpartition("/"), name) for name in state)
        self.updates = {name: int(state[key]) for (name, _, last), key in counts if last == UPDATES}
