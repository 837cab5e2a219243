"""LOMO's update from one gradient: the sink (model/backward/sink.py) of its backward pass.

The gradient of a linear layer is computed in one buffer for all layers, and one kernel (ops/sgd.py) decays, clips,
updates, rounds, sums squares and checks for non-finite values. If there are two backward passes (exact clipping,
float16), the first only sums squares (`Now.only_norm`).

What a pass adds up is a Tally. The squared norm of the whole gradient has bits that do not depend on the order in which
gradients arrive:

    ||g||^2 = sum over tensors t of s_t,        s_t = sum of the squares of t's gradient

The order depends on how a backward pass runs (linear layers offer their products early, autograd delivers the others
later, a recorded block hands over everything at its end), sums in float32 depend on their order, and exact clipping
multiplies every gradient by a function of this sum. So each tensor, each chunk of a table and each expert has a place
of its own (4 bytes, at a fixed address), and the places are summed in the order of the layout.

On several ranks each updates the part of the weights that it keeps, from the sum of all gradients (methods/shards.py):
the rule of one process on this rank's elements of a unit, by their indices, so rounding is the same. If a rule needs
whole tensors, every rank gets the whole gradient of a tensor and makes the same update in its slot, but writes back
only its part; the state of such a rule is the same on all ranks. Whole gradients cross the network twice, the second
time in float32. Squares, counts of changed weights and the flag for non-finite values are summed at the end of a
backward pass. Ranks exchange which tensors have a gradient only if that makes a difference: if weights decay, or a rule
keeps state.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from keyhole import ops
from keyhole.methods.base import Saved, State
from keyhole.methods.lomo.traits import LOMOConfig, LOMOSettings
from keyhole.methods.shards import GradientParts
from keyhole.methods.step_numbers import StepNumbers
from keyhole.methods.weight_decay import weight_decay_of
from keyhole.model.backward.sink import Sink
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Layout, Unit
from keyhole.model.weights.homes import view


class Tally:
    """What a backward pass adds up: squares of gradients, changed weights, and whether a value was not finite."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        starts = {tensor.start for tensor in layout.tensors}
        starts |= {unit.start for unit in layout.units if unit.rows is not None}
        starts |= {t.expert(e).start for t in layout.tensors for e in range(t.experts)}
        self.starts = sorted(starts)
        self.sums = torch.zeros(len(self.starts) + 1, device=device)
        *self.places, self.extra = self.sums.unbind()  # extra: of parameters beside the model's
        self.changed = torch.zeros((), dtype=torch.int64, device=device)
        self.bad = torch.zeros((), dtype=torch.int32, device=device)

    def squares_of(self, tensor: FlatTensor) -> torch.Tensor:
        """The place to which the squares of this gradient, or of some of its elements, are added."""
        return self.places[bisect_right(self.starts, tensor.start) - 1]

    def norm(self) -> torch.Tensor:
        return self.sums.sum().sqrt()

    def zero_(self) -> None:
        """`bad` stays: it says whether the weights are those of one step."""
        self.sums.zero_()
        self.changed.zero_()


@dataclass
class Now:
    """One step, as its updates see it."""

    lr: float = 0.0
    step: int = 0
    beta: float = 0.0  # decay of moments, for recorded updates
    measures: bool = True  # this backward pass adds to the norm
    only_norm: bool = False  # and does nothing else
    received: set[str] = field(default_factory=set)  # tensors that had a gradient in it


class Update(Sink):
    """Gradient descent. A subclass has another rule, and its state. numbers: the device's copy of the step's numbers,
    if updates may be recorded as CUDA graphs."""

    by_expert = True
    whole_tensors = False  # True: the rule needs a tensor's whole gradient, not only some of its elements
    keys = frozenset({"lost"})  # of its state; lost: rounding errors kept by Kahan summation

    def __init__(self, model: Model, own: LOMOSettings, numbers: StepNumbers | None, offers: bool) -> None:
        self.model, self.own, self.numbers, self.now = model, own, numbers, Now()
        self.decay = weight_decay_of(model.module, own)
        self.groups = own.groups or []
        # The host asks which experts of a stack had tokens.
        self.asks = self.whole_tensors and any(tensor.stacked for tensor in model.layout.tensors)
        self.clip_value = own.clip_value if isinstance(own, LOMOConfig) else None
        self.tally = Tally(model.layout, model.device)
        self.scale = torch.ones((), device=model.device)  # of gradients, at a fixed address
        matrices = [t.matrix for u in model.layout.of_kind("block") for t in u.tensors if len(t.matrix) == 2]
        largest = max((shape.numel() for shape in matrices), default=0) if offers or model.layout.experts else 0
        self.buffer = torch.empty(largest, dtype=model.dtype, device=model.device)
        self.kept: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)  # state, by tensor and key

    def begin(self, now: Now) -> None:
        """Called before the backward pass whose gradients are applied."""
        self.now = now
        if self.numbers is not None:
            self.numbers.set(now.lr, now.step, now.beta)

    def applying(self) -> AbstractContextManager[None]:
        """A context for that backward pass."""
        return nullcontext()

    # -- Sink --------------------------------------------------------------------------------------------------------

    @property
    def update_key(self) -> Hashable | None:
        if self.numbers is None or self.groups or self.own.rounding == "kahan" or self.asks:
            return None
        return "norm" if self.now.only_norm else ("update", self.now.measures)

    def updated(self, tensors: list[FlatTensor]) -> None:
        self.now.received |= {tensor.name for tensor in tensors}

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        grad_OI = self.buffer[: w_OI.numel()].view(w_OI.shape)
        torch.mm(dy_MO.t(), x_MI, out=grad_OI)
        self.gradient(tensor, w_OI, grad_OI)
        return True

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Updates one tensor; in a stack of experts, each expert as a matrix of its own, if it is computed so or the
        rule has a step size per matrix."""
        apart = tensor.stacked if self.whole_tensors else tensor.experts
        if apart and w.dim() == 3 and not self.now.only_norm:
            for e, met in enumerate(grad.flatten(1).any(dim=1).tolist()):
                expert = tensor.expert(e)
                if met or not self.unmet(expert):
                    self.gradient(expert, w[e], grad[e])
            return
        self.apply(tensor, w, grad.contiguous(), self.tally)

    def unmet(self, tensor: FlatTensor) -> bool:
        """Leaves an expert without tokens unchanged, weights and state, unless its weights decay."""
        return self.now.only_norm or self.rates(tensor)[1] == 0

    def finished(self, unit: Unit) -> bool:
        """Whether the unit's weights have changed."""
        return not self.now.only_norm

    # -- the rule ----------------------------------------------------------------------------------------------------

    def apply(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, tally: Tally) -> None:
        """Updates a tensor, or some of its elements, and adds to the tally."""
        if self.now.only_norm:
            ops.sum_squares_(grad, tally.squares_of(tensor), self.scale, offset=tensor.start)
            return
        self.now.received.add(tensor.name)
        lr, decay = self.rates(tensor)
        self.rule(tensor, w, grad, lr, decay, self.rounding_of(tensor, w, tally))

    def rule(
        self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, lr: float, decay: float, how: dict[str, Any]
    ) -> None:
        """how: arguments of an op, about rounding and counting."""
        rate: Any = lr
        if self.numbers is not None and self.update_key is not None:
            rate, how["step"] = self.numbers.lr, self.numbers.step
        ops.sgd_update_(w, grad, lr=rate, weight_decay=decay, scale=self.scale, clip_value=self.clip_value, **how)

    def rounding_of(self, tensor: FlatTensor, w: torch.Tensor, tally: Tally) -> dict[str, Any]:
        rounding = "nearest" if w.dtype == torch.float32 else self.own.rounding
        own = self.kept[tensor.name]
        if rounding == "kahan" and "lost" not in own:
            own["lost"] = torch.zeros_like(w)
        return {
            "rounding": rounding,
            "compensation": own.get("lost") if rounding == "kahan" else None,
            "offset": tensor.start,
            "seed": self.own.seed,
            "step": self.now.step,
            "sum_squares": tally.squares_of(tensor) if self.now.measures else None,
            "bad": tally.bad,
            "changed": tally.changed,
        }

    def describe(self) -> list[str]:
        """Lines for the start block."""
        return []

    def rates(self, tensor: FlatTensor) -> tuple[float, float]:
        """(learning rate, weight decay) of a tensor."""
        lr, decay = self.now.lr, self.decay.of(tensor.param)
        group = next((group for group in self.groups if re.search(group["match"], tensor.name)), {})
        return lr * group.get("lr_scale", 1.0), group.get("weight_decay", decay)

    # -- state -------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        return {f"{name}/{key}": value for name, own in self.kept.items() for key, value in own.items()}

    def load(self, state: Saved, step: int) -> None:
        """Loads copies."""
        self.kept.clear()
        for full_name, value in state.items():
            name, _, key = full_name.rpartition("/")
            if key in self.keys:
                self.kept[name][key] = value.to(self.model.device, copy=True)


class Shards(GradientParts):
    """Stands before the update on several ranks."""

    def __init__(self, model: Model, update: Update) -> None:
        super().__init__(model)
        self.update = update
        self.own = Tally(model.layout, model.device)  # of this rank's part

    def whole(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        self.update.gradient(tensor, w, grad)

    def finished(self, unit: Unit) -> bool:
        update = self.update
        if unit.index in self.place:
            tensors = self.with_gradient(unit, bool(update.own.weight_decay or update.groups or update.whole_tensors))
            if update.whole_tensors and not update.now.only_norm:
                w = self.on_device(unit)
                for tensor, grad in self.whole_gradients(unit, tensors):
                    update.gradient(tensor, view(w, tensor, unit.start), grad)
            else:
                for piece in self.pieces(unit, tensors):
                    if piece.begin < piece.end:
                        shape = torch.Size((piece.end - piece.begin,))
                        own = replace(piece.tensor, start=piece.tensor.start + piece.begin, shape=shape)
                        update.apply(own, piece.w.view(-1)[piece.begin : piece.end], piece.grad, self.own)
        return update.finished(unit)

    def add_up(self) -> None:
        """Sums the counts over all ranks, at the end of a backward pass."""
        total, own = self.update.tally, self.own
        found = torch.stack([own.sums.sum().double(), own.changed.double(), (own.bad + total.bad).double()])
        squares, changed, bad = self.ranks.gather(found).sum(dim=0)
        total.extra.add_(squares.float())
        total.changed += changed.to(total.changed.dtype)
        total.bad.copy_(bad > 0)
        own.zero_()
        own.bad.zero_()
