"""Muon inside the reverse sweep: the orthogonalised momentum of every matrix of a block, AdamW for everything else.

    M <- M + (1 - momentum) (G - M)             G: the whole gradient, accumulated and clipped
    U  = G + momentum (M - G)                   nesterov; else U = M
    O  = Newton-Schulz(U)                       about the nearest orthogonal matrix, in bfloat16
    W <- W - lr (a O + weight_decay W)          a = 0.2 sqrt(max(m, n)), or sqrt(max(1, m / n)) (adjust_lr_fn)

The rule and the names of its settings are torch.optim.Muon's (Jordan et al., 2024). It needs whole matrices: one is
orthogonalised while its unit is on the device, whoever keeps it otherwise, so a streamed run has the bits of a resident
one. Embedding, head, vectors, and what else is no matrix of a block get AdamW, at the same rate: with match_rms_adamw a
step of a matrix is as long as AdamW's.

State: one momentum per element of a matrix, two moments per element of the rest, in host memory, wherever the weights
live, 16 bits each by default (methods/states.py: rounded stochastically). A unit's state is a page of an engine of its
own: it is uploaded before the unit's backward pass needs it, changed on the device, and written back. Bytes per
parameter: 2 in host memory, 2 up and 2 down the link per step; on the device a few units' worth. Everything else is
LOMO's: no gradient is kept, exact clipping takes a second backward pass, and a stack of experts is a matrix each.

On several ranks each has the whole state and makes the same update in its slot (lomo/update.py).
"""

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.base import Saved, State
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.lomo.update import Update
from keyhole.methods.muon.memory import adam_numel, host_state, is_matrix, page_numel, slot_count
from keyhole.methods.muon.traits import MUON, MuonConfig
from keyhole.methods.states import FORMATS, PLACES, StatePages
from keyhole.methods.work import check_host_memory
from keyhole.model.backward.sink import tensors_of
from keyhole.model.structure.layout import FlatTensor, Unit

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(update_MN: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    """About U V^T of the singular value decomposition U S V^T, as torch.optim.Muon computes it: bfloat16."""
    a, b, c = coefficients
    tall = update_MN.shape[0] > update_MN.shape[1]
    x = update_MN.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class MuonUpdate(Update):
    """The rule with its state."""

    own: MuonConfig
    whole_tensors = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        layout = self.model.layout
        check_host_memory(*host_state(layout, set(), self.model.dtype.itemsize, self.own))
        self.format = FORMATS[self.own.moments]
        numels = {unit.index: page_numel(unit) for unit in layout.units}
        self.pages = StatePages(numels, self.format, self.model.device, slot_count(layout))
        self.updates: dict[str, int] = {}  # of a tensor; fewer than steps if it was frozen, or had no gradient
        self.starts = [unit.start for unit in layout.units]
        self.second: dict[int, int] = {}  # by the start of a tensor with AdamW: where its second moment begins
        for unit in layout.units:
            end = unit.numel
            for tensor in tensors_of(unit):
                if tensor.param.requires_grad and not is_matrix(tensor):
                    self.second[tensor.start], end = end, end + adam_numel(tensor)

    def applying(self) -> AbstractContextManager[None]:
        units = [unit for unit in self.model.layout.units if unit.index in self.pages.units]
        order = [u.index for u in reversed(units) if u.kind not in ("common", "table")]
        order += [u.index for u in units if u.kind == "table"] + [u.index for u in units if u.kind == "common"]
        return self.pages.sweep(order)

    def _state_of(self, tensor: FlatTensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The first moment (or momentum) of a tensor on the device, and its second moment."""
        unit = self.model.layout.units[bisect_right(self.starts, tensor.start) - 1]
        page, begin, numel = self.pages.acquire(unit.index), tensor.start - unit.start, tensor.shape.numel()
        second = self.second.get(tensor.start)
        v = None if second is None else page[second : second + numel].view(tensor.shape)
        return page[begin : begin + numel].view(tensor.shape), v

    def rule(
        self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, lr: float, decay: float, how: dict[str, Any]
    ) -> None:
        own = self.own
        if (total := how.pop("sum_squares")) is not None:  # of the unscaled gradient
            ops.sum_squares_(grad, total, self.scale, how["bad"], offset=tensor.start)
        m, v = self._state_of(tensor)
        at = tensor.start + PLACES, own.seed, self.now.step
        if v is not None:
            step, factor = self._adam(tensor.name, m, v, grad, at), 1.0
        else:
            self.format.lerp_(m, grad, 1 - own.momentum, at, self.scale)
            update = (grad.float() * self.scale).lerp(m.float(), own.momentum) if own.nesterov else m.float()
            step = newton_schulz(update, own.ns_coefficients or COEFFICIENTS, own.ns_steps, own.ns_eps).contiguous()
            rows, columns = w.shape
            adamw = own.adjust_lr_fn == "match_rms_adamw"
            factor = 0.2 * max(rows, columns) ** 0.5 if adamw else max(1.0, rows / columns) ** 0.5
        ops.sgd_update_(w, step, lr=lr * factor, weight_decay=decay / factor, **how)

    def _adam(
        self, name: str, m: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, at: tuple[int, int, int]
    ) -> torch.Tensor:
        """AdamW's step for a tensor that is no matrix of a block."""
        own, count = self.own, self.updates.get(name, 0) + 1
        self.updates[name] = count
        grad = grad.float() * self.scale
        self.format.lerp_(m, grad, 1 - own.beta1, at)
        self.format.lerp_(v, grad.square(), 1 - own.beta2, (at[0] + PLACES, *at[1:]))
        root = v.float().sqrt().div_((1 - own.beta2**count) ** 0.5).add_(own.eps)
        return (m.float() / root).div_(1 - own.beta1**count)

    def finished(self, unit: Unit) -> bool:
        self.pages.release(unit.index)
        return super().finished(unit)

    # -- state -------------------------------------------------------------------------------------------------------

    def _views(self) -> dict[str, torch.Tensor]:
        """The state by tensor (a chunk of a table is one of its own), as views of host memory."""
        self.pages.wait()
        found: dict[str, torch.Tensor] = {}
        for unit in self.model.layout.units:
            home = self.pages.homes[unit.index]
            for tensor in (tensor for tensor in tensors_of(unit) if tensor.param.requires_grad):
                begin, numel, second = tensor.start - unit.start, tensor.shape.numel(), self.second.get(tensor.start)
                key = "momentum_buffer" if second is None else "exp_avg"
                found[f"{tensor.name}/{key}"] = home[begin : begin + numel].view(tensor.shape)
                if second is not None:
                    found[f"{tensor.name}/exp_avg_sq"] = home[second : second + numel].view(tensor.shape)
        return found

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


class Muon(LOMO):
    """LOMO whose matrices move along their orthogonalised momentum. `lr` may be changed between steps."""

    row = MUON
    update: MuonUpdate
    rule = MuonUpdate
    waits = True  # its state must not include a step that is skipped

    def _setup(self) -> None:
        if self.model.dtype == torch.float16:
            raise UserError("dtype: muon has no use for float16, whose gradients underflow; use bfloat16")
        super()._setup()

    def describe(self) -> list[str]:
        """Lines for the start block."""
        pages, form = self.update.pages, self.update.format
        state = f"muon: {pages.bytes / 2**30:.2f} GiB of state in host memory, {8 * form.dtype.itemsize} bits a number"
        return [f"{state}, on its way with each unit", *super().describe()]
