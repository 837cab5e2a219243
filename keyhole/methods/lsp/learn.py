"""When LSP learns projectors, and from which gradients.

Projectors are learned in an extra reverse sweep over the step's batch, which changes no weight. Each linear layer
offers dY and X, the factors of its gradient, which is processed before the next matrix. No two gradients exist at once.

    first step       fits the projectors of every matrix (fit.py)
    check_freq       checks a sample of the matrices, drawn anew each time: the bias is measured on the batch; if it is
                     above alpha, new projectors are drawn and fitted. They are used if their bias is lower, and Adam's
                     moments are transferred into their subspace

The gradients are those of the first micro-batch of the step itself. Its tokens are cut into slices with a gradient
each, so that the fit generalises beyond one gradient. Padding that `step` knows of (attention_mask) is not counted, so
the projectors do not depend on it. The bias is a mean over these slices. `found` is the bias before fitting, of
projectors that have not seen this batch; `biases` are those that the step uses, which are in-sample for newly fitted
projectors, and lower than on other batches (benchmarks/records/lsp_bias.md).

Cost: one backward pass, and the fits: products of d columns for blocks, some 50 steps of dense ones for the others
(docs/methods.md has seconds, and so does the log of each run).

`lsp.preset: paper` is LSP-Offload's Algorithm 1; traits.py lists the differences from ours. Details that the paper
leaves open are the same in both: the weight of the regularisation, the optimizer of the fit (Adam), its time limit
(lsp.fit_steps), and which batch is the sampled subset (the step's own).
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from keyhole.errors import UserError
from keyhole.methods.base import Saved
from keyhole.methods.lsp.fit import Gradient, bias, fit, norm_squared, transfer_moments
from keyhole.methods.lsp.target import Target
from keyhole.methods.lsp.traits import LSPConfig
from keyhole.model.backward.sink import Sink, SinkPolicy
from keyhole.model.batch import DeviceBatch
from keyhole.model.structure.layout import FlatTensor, Unit
from keyhole.ops.lsp.projector import Projector

Moments = tuple[torch.Tensor, torch.Tensor]
MomentsOf = Callable[[Target], Moments]


@dataclass(frozen=True)
class Verdict:
    """The result for one matrix: the bias that was found (None for its first projectors, which are not measured), the
    bias of the projectors that it will use, and new projectors (None: it keeps its own)."""

    found: float | None
    bias: float
    taken: tuple[Projector, Projector] | None = None


@dataclass(frozen=True)
class Learning:
    """Draws the projectors of a run, and says when they are checked."""

    own: LSPConfig
    device: torch.device

    def is_due(self, step_count: int) -> bool:
        """Whether there is a check before the next update."""
        since = step_count - self.own.rule.first_check
        return self.own.learn and since >= 0 and since % self.own.check_freq == 0

    def draw(self, target: Target) -> tuple[Projector, Projector]:
        """Newly drawn projectors for a matrix."""
        return target.draw(self.own.d, self.own.r, self.own.seed, self.device)

    def restore(self, target: Target, state: Saved) -> None:
        """Restores projectors from a checkpoint: positions are drawn again, numbers are loaded."""
        generation = int(state[f"{target.name}/generation"])
        target.generation = max(0, generation - 1)  # they were drawn in the generation before
        p, q = self.draw(target)
        target.generation = generation
        for key, drawn in (("p", p), ("q", q)):
            values = state[f"{target.name}/{key}"]
            if values.shape != drawn.values_Rr.shape:
                raise UserError(
                    f"lsp: the checkpoint's projector of {target.name} has another shape; keep lsp.d, r and kind"
                )
        values_p, values_q = (state[f"{target.name}/{key}"].to(self.device) for key in "pq")
        target.p, target.q = p.with_values(values_p), q.with_values(values_q)
        target.rescale()


class Check(Sink):
    """A sink that measures the bias of projectors and fits new ones, and changes no weight. targets: by the first
    element; moments_of: returns Adam's moments of a target. found, biases: by name, before and after fits."""

    policy = SinkPolicy(accumulates=True, by_factors=True)

    def __init__(self, learning: Learning, targets: dict[int, Target], step_count: int, moments_of: MomentsOf) -> None:
        self.learning, self.own, self.rule = learning, learning.own, learning.own.rule
        self.targets, self.moments_of = targets, moments_of
        self.positions = 0  # of the sample; 0: unknown
        self.places: list[int] = []  # those of them that are not padding
        self.found: dict[str, float] = {}
        self.biases: dict[str, float] = {}
        matrices = [start for start, target in targets.items() if target.p is not None]
        if step_count:
            count = math.ceil(self.rule.check_share * len(matrices))
            matrices = random.Random(f"{self.own.seed} {step_count}").sample(matrices, count)
        self.wanted = set(matrices)

    def know(self, sample: DeviceBatch) -> None:
        """Takes the first micro-batch, of which padding is not to be counted. The host waits."""
        mask_BT = sample.inputs.get("attention_mask")
        if mask_BT is not None:
            self.positions, self.places = mask_BT.numel(), mask_BT.flatten().nonzero().flatten().tolist()

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """Uses the first micro-batch as the sample."""
        if tensor.start in self.wanted:
            places = self.places if self.places and len(dy_MO) == self.positions else range(len(dy_MO))
            self._check(tensor, slices_of(dy_MO.detach(), x_MI.detach(), self.rule.slices, places))
        return True

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Takes the gradient of a matrix that is not used by a linear layer."""
        if tensor.start in self.wanted:
            self._check(tensor, [grad.detach()])

    def finished(self, unit: Unit) -> bool:
        return False

    def _check(self, tensor: FlatTensor, grads: list[Gradient]) -> None:
        self.wanted.discard(tensor.start)
        target = self.targets[tensor.start]
        grads = [grad for grad in grads if 0 < float(norm_squared(grad)) < float("inf")]
        if grads:
            with torch.no_grad():
                self._decided(target, self._consider(target, grads))

    def _consider(self, target: Target, grads: list[Gradient]) -> Verdict:
        """Fits the target's first projectors, or new ones if its own are no longer good. Changes nothing."""
        fitted = partial(fit, grads, steps=self.own.fit_steps, alpha=self.own.alpha)
        if self._is_first(target):
            p, q = fitted(*target.pair)
            return Verdict(None, mean_bias(grads, p, q), (p, q))
        before = mean_bias(grads, *target.pair)
        if before <= self.own.alpha:
            return Verdict(before, before)
        p, q = fitted(*self.learning.draw(target))
        after = mean_bias(grads, p, q)
        if self.rule.only_better and not after < before:
            return Verdict(before, before)
        return Verdict(before, after, (p, q))

    def _is_first(self, target: Target) -> bool:
        """Whether the target's projectors are not fitted yet: positions stay, and there are no moments yet."""
        return target.generation == 0 and self.rule.first_check == 0

    def _decided(self, target: Target, verdict: Verdict) -> None:
        """Records biases, and gives the target its new projectors; transfers its moments."""
        if verdict.found is not None:
            self.found[target.name] = verdict.found
        self.biases[target.name] = verdict.bias
        if verdict.taken is not None:
            if not self._is_first(target):
                self._carry_moments(target, *verdict.taken)
            target.take(*verdict.taken)

    def _carry_moments(self, target: Target, p: Projector, q: Projector) -> None:
        old = self.moments_of(target)
        for moment, new in zip(old, self._carried(old, target, p, q), strict=True):
            moment.copy_(new)

    def _carried(self, old: Moments, target: Target, p: Projector, q: Projector) -> Moments:
        """The moments in the subspace of other projectors, on the device."""
        m, v = (moment.to(self.learning.device) for moment in old)
        return transfer_moments(m, v, target.pair, (p, q))


def slices_of(dy_MO: torch.Tensor, x_MI: torch.Tensor, count: int, places: Sequence[int]) -> list[Gradient]:
    """Gradients of slices of the positions, each with as many of these places. What is left over at the end is in none.
    Others in a slice, which are padding, have no error."""
    each = max(1, len(places) // count)
    firsts = range(0, len(places) - each + 1, each)[:count]
    ends = [(places[i], places[i + each - 1] + 1) for i in firsts]
    return [(dy_MO[begin:end], x_MI[begin:end]) for begin, end in ends]


def mean_bias(grads: list[Gradient], p: Projector, q: Projector) -> float:
    """The mean bias over the gradients. The host waits."""
    return float(torch.stack([bias(grad, p, q) for grad in grads]).mean())
