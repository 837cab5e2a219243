"""A trained tensor of LSP: a matrix with its two projectors, or a plain tensor.

    matrix    S = P^T G Q = sum over products of (dY P)^T (X Q)        [d_P, d_Q], added up in float32
              W <- round(keep W + lr scale P delta Q^T)                    keep = 1 - lr weight_decay
    plain     G itself: vectors, embeddings, head, stacks of experts, and matrices no side of which is larger than d
              w <- round(keep w + lr delta)

So dY and X are compressed before their product, and a matrix's gradient is never computed. (A weight that is not used
by nn.Linear, such as GPT-2's, has a complete gradient, which is compressed then.)

`scale` makes a learning rate mean the same as for AdamW: Adam's delta has entries of about 1, and P delta Q^T has
entries of rms |P| |Q| / sqrt(m n) times that (Frobenius norms; half for orthonormal blocks that keep every second
direction). scale is its inverse,

    scale = sqrt(m n) / (|P| |Q|)

and 1 for identities, in which case this is AdamW. The paper has no scale: lsp.preset=paper always sets it to 1.

A side of the matrix that is not longer than d has the identity as its projector: nothing is lost there. If others is
frozen, plain tensors are not trained at all, but for matrices with both sides <= d, for which the subspace is the whole
space.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.base import Saved
from keyhole.methods.lsp.fit import compressed
from keyhole.methods.lsp.traits import LSPConfig
from keyhole.model.backward.sink import tensors_of
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor
from keyhole.ops.arguments import Number
from keyhole.ops.lsp.blocks import is_one_stage
from keyhole.ops.lsp.projector import Projector, identity_projector, random_projector

SEEDS = 1 << 20  # maximum number of projectors per target in a run
ALIGN = 64  # elements


@dataclass
class Target:
    """One trained tensor (or chunk of a table). p is None: plain."""

    tensor: FlatTensor
    unit: int
    own: LSPConfig
    p: Projector | None = None
    q: Projector | None = None
    scale: float = 1.0
    generation: int = 0  # number of pairs of projectors it has had; 0: not fitted yet
    begin: int = 0  # index in the buffers of its unit

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def pair(self) -> tuple[Projector, Projector]:
        """Its projectors, if it is not plain."""
        assert self.p is not None and self.q is not None
        return self.p, self.q

    @cached_property
    def is_one_stage(self) -> bool:
        """Whether a kernel updates it: later projectors have the shape of the first."""
        return self.p is None or is_one_stage(*self.pair)

    @property
    def identity(self) -> tuple[float, ...]:
        """A value that changes when the projectors do."""
        places = () if self.p is None else tuple(side.values_Rr.data_ptr() for side in self.pair)
        return self.generation, self.scale, *places

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what the optimizer sees."""
        return tuple(self.tensor.shape) if self.p is None else (self.pair[0].d, self.pair[1].d)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of a buffer of its unit."""
        return flat[self.begin : self.begin + self.numel].view(self.shape)

    def add(self, s: torch.Tensor, first: bool, dy_TM: torch.Tensor, x_TN: torch.Tensor) -> None:
        """s += the (compressed) gradient dy^T x; first: overwrites s."""
        if self.p is not None and self.q is not None:
            dy_TM, x_TN = (x if x.stride(1) == 1 else x.contiguous() for x in (dy_TM, x_TN))
            dy_TM, x_TN = ops.compress(dy_TM, self.p), ops.compress(x_TN, self.q)
        if dy_TM.dtype == torch.float32 or dy_TM.device.type == "cpu":
            s.addmm_(dy_TM.float().t(), x_TN.float(), beta=0.0 if first else 1.0)
        elif first:
            torch.mm(dy_TM.t(), x_TN, out_dtype=torch.float32, out=s)
        else:
            s.add_(torch.mm(dy_TM.t(), x_TN, out_dtype=torch.float32))

    def add_gradient(self, s: torch.Tensor, first: bool, grad: torch.Tensor) -> None:
        """The same, for a gradient given as a tensor."""
        grad = grad if self.p is None else compressed(grad.contiguous(), *self.pair)
        s.copy_(grad) if first else s.add_(grad)

    def rates(self, lr: float, decay: float) -> tuple[float, float]:
        """Two numbers of a step, for `apply`: for a matrix lr scale and keep = 1 - lr decay; for a plain tensor, whose
        update is w - rate (delta + wd w), with opposite sign: -lr and wd."""
        keep = 1.0 - lr * decay
        return (-lr, (keep - 1) / lr if lr else 0) if self.p is None else (lr * self.scale, keep)

    def apply(self, w: torch.Tensor, delta: torch.Tensor, rates: tuple[Number, Number], how: dict) -> None:
        """Updates the weight by lr delta, through the projectors. how: rounding, seed, step."""
        how = how | {"offset": self.tensor.start}
        if self.p is not None and self.q is not None:
            ops.decompress_add_(w, delta.view(self.shape), self.p, self.q, rates[0], keep=rates[1], **how)
        else:
            decay: Any = rates[1]  # may be on the device, as the rate
            ops.sgd_update_(w, delta.view(w.shape), lr=rates[0], weight_decay=decay, **how)

    def take(self, p: Projector, q: Projector) -> None:
        """Sets new projectors."""
        self.p, self.q, self.generation = p, q, self.generation + 1
        self.rescale()

    def rescale(self) -> None:
        """Sets `scale` for the projectors."""
        if self.own.rule.scaled:
            p, q = self.pair
            lengths = p.values_Rr.double().norm() * q.values_Rr.double().norm()
            self.scale = float((p.rows * q.rows) ** 0.5 / lengths.clamp(min=1e-30))

    def draw(self, device: torch.device, generation: int | None = None) -> tuple[Projector, Projector]:
        """Newly drawn projectors: a function of the seed, the tensor and its generation."""
        own, kind = self.own, self.own.rule.kind
        generation = self.generation if generation is None else generation
        seed = (own.seed * 1_000_003 + self.tensor.start) * SEEDS + 2 * generation
        p, q = (
            random_projector(kind, rows, own.d, own.r, seed=(seed + i) % 2**63, device=device)
            if own.d < rows
            else identity_projector(rows, device, kind)
            for i, rows in enumerate(self.tensor.shape)
        )
        return p, q

    def restore(self, state: Saved, device: torch.device) -> None:
        """Restores projectors from a checkpoint: positions are drawn again, numbers are loaded."""
        self.generation = int(state[f"{self.name}/generation"])
        pair = self.draw(device, max(0, self.generation - 1))  # they were drawn in the generation before
        values = [state[f"{self.name}/{side}"].to(device) for side in "pq"]
        if any(new.shape != drawn.values_Rr.shape for new, drawn in zip(values, pair, strict=True)):
            raise UserError(f"lsp: the checkpoint's projector of {self.name} has another shape; keep lsp.d, r and kind")
        self.p, self.q = (drawn.with_values(new) for new, drawn in zip(values, pair, strict=True))
        self.rescale()


Targets = dict[int, list[Target]]  # by unit


def assign_places(targets: Targets) -> dict[int, int]:
    """Assigns every target its place in the buffers of its unit; returns the lengths of the buffers."""
    lengths = {}
    for unit, members in targets.items():
        lengths[unit] = 0
        for target in members:
            target.begin = lengths[unit]
            lengths[unit] += -(-target.numel // ALIGN) * ALIGN
    return lengths


def find_targets(model: Model, own: LSPConfig) -> Targets:
    """All trained tensors, by unit. Freezes the rest."""
    found: Targets = {}
    for unit in model.layout.units:
        tensors = [tensor for tensor in tensors_of(unit) if tensor.param.requires_grad]
        members = [Target(tensor, unit.index, own) for tensor in tensors]
        for target in list(members):
            matrix = unit.kind == "block" and len(target.tensor.shape) == 2
            if matrix and own.d < max(target.tensor.shape):
                target.p, target.q = target.draw(model.device)
                target.rescale()
            elif not matrix and own.others == "frozen":
                target.tensor.param.requires_grad_(False)
                members.remove(target)
        if members:
            found[unit.index] = members
    if not any(target.p is not None or len(target.tensor.shape) == 2 for group in found.values() for target in group):
        raise UserError("lsp: no matrix of a block is trained; unfreeze some, or use method=adamw")
    return found
