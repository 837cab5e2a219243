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

On several ranks the one that has the first micro-batch (`judge`) decides, and sends the numbers of new projectors (r
per row and side); every rank draws their positions from the seed. The gradient of a matrix that no linear layer uses is
first summed over ranks.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from keyhole.methods.lsp.fit import Gradient, bias, fit, norm_squared, transfer_moments
from keyhole.methods.lsp.target import Target
from keyhole.methods.lsp.traits import LSPConfig
from keyhole.methods.shards import of_any_rank
from keyhole.model.backward.sink import Sink
from keyhole.model.batch import DeviceBatch
from keyhole.model.structure.layout import FlatTensor, Unit
from keyhole.ops.lsp.projector import Projector
from keyhole.ranks import Ranks


@dataclass(frozen=True)
class Verdict:
    """The result for one matrix: the bias that was found (None for its first projectors, which are not measured), the
    bias of the projectors that it will use, and the numbers of new ones (None: it keeps its own)."""

    found: float | None
    bias: float
    values: list[torch.Tensor] | None = None


class Check(Sink):
    """A sink that measures the bias of projectors and fits new ones, and changes no weight. targets: by the first
    element; moments_of: returns Adam's moments of a target; sample: the first micro-batch, of which padding is not
    counted. found, biases: by name, before and after fits."""

    accumulates = by_factors = True

    def __init__(
        self,
        own: LSPConfig,
        targets: dict[int, Target],
        step_count: int,
        moments_of: Callable[[Target], list[torch.Tensor]],
        sample: DeviceBatch | None,
        ranks: Ranks,
        judge: int,
    ) -> None:
        self.own, self.targets, self.moments_of, self.ranks, self.judge = own, targets, moments_of, ranks, judge
        self.found: dict[str, float] = {}
        self.biases: dict[str, float] = {}
        matrices = [start for start, target in targets.items() if target.p is not None]
        if step_count:
            count = math.ceil(own.rule.check_share * len(matrices))
            matrices = random.Random(f"{own.seed} {step_count}").sample(matrices, count)
        self.wanted = set(matrices)
        self.asked: dict[int, list[int]] = defaultdict(list)  # by unit
        for start in sorted(matrices):
            self.asked[targets[start].unit].append(start)
        self.complete: dict[int, torch.Tensor] = {}  # gradients that are to be summed over ranks
        self.verdicts: dict[int, Verdict] = {}
        mask_BT = None if sample is None else sample.inputs.get("attention_mask")
        self.positions = 0 if mask_BT is None else mask_BT.numel()  # of the sample; 0: unknown
        self.places = [] if mask_BT is None else mask_BT.flatten().nonzero().flatten().tolist()  # without padding

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """Uses the first micro-batch as the sample."""
        if tensor.start in self.wanted and self.ranks.rank == self.judge:
            places = self.places if self.places and len(dy_MO) == self.positions else range(len(dy_MO))
            self._look(tensor, slices_of(dy_MO.detach(), x_MI.detach(), self.own.rule.slices, places))
        return True

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Takes the gradient of a matrix that is not used by a linear layer."""
        if tensor.start in self.wanted and self.ranks.several:
            self.complete[tensor.start] = grad.detach()
        elif tensor.start in self.wanted:
            self._look(tensor, [grad.detach()])

    @torch.no_grad()
    def finished(self, unit: Unit) -> bool:
        """Gives the unit's targets their new projectors."""
        if starts := self.asked.pop(unit.index, []):
            for start in of_any_rank(self.ranks, starts, [start in self.complete for start in starts]):
                tensor, own = self.targets[start].tensor, self.complete.pop(start, None)
                device = self.targets[start].pair[0].values_Rr.device
                total = self.ranks.sum(torch.zeros(tensor.shape, device=device) if own is None else own)
                if self.ranks.rank == self.judge:
                    self._look(tensor, [total])
            for start, verdict in self.ranks.from_rank(self.judge, lambda: self.verdicts).items():
                self._decided(self.targets[start], verdict)
            self.verdicts = {}
        return False

    def _look(self, tensor: FlatTensor, grads: list[Gradient]) -> None:
        self.wanted.discard(tensor.start)
        grads = [grad for grad in grads if 0 < float(norm_squared(grad)) < float("inf")]
        if grads:
            with torch.no_grad():
                self.verdicts[tensor.start] = self._consider(self.targets[tensor.start], grads)

    def _consider(self, target: Target, grads: list[Gradient]) -> Verdict:
        """Fits the target's first projectors, or new ones if its own are no longer good. Changes nothing."""
        fitted = partial(fit, grads, steps=self.own.fit_steps, alpha=self.own.alpha)
        first, before = self._is_first(target), None
        if not first:
            before = mean_bias(grads, *target.pair)
            if before <= self.own.alpha:
                return Verdict(before, before)
        p, q = fitted(*(target.pair if first else target.draw(target.pair[0].values_Rr.device)))
        after = mean_bias(grads, p, q)
        if before is not None and self.own.rule.only_better and not after < before:
            return Verdict(before, before)
        return Verdict(before, after, [side.values_Rr.cpu() for side in (p, q)])

    def _is_first(self, target: Target) -> bool:
        """Whether the target's projectors are not fitted yet: positions stay, and there are no moments yet."""
        return target.generation == 0 and self.own.rule.first_check == 0

    def _decided(self, target: Target, verdict: Verdict) -> None:
        """Records biases, and gives the target its new projectors; transfers its moments."""
        if verdict.found is not None:
            self.found[target.name] = verdict.found
        self.biases[target.name] = verdict.bias
        if verdict.values is None:
            return
        first, device = self._is_first(target), target.pair[0].values_Rr.device
        drawn = target.pair if first else target.draw(device)
        p, q = (side.with_values(new.to(device)) for side, new in zip(drawn, verdict.values, strict=True))
        if not first:
            moments = self.moments_of(target)
            m, v = (moment.to(device) for moment in moments)
            for moment, new in zip(moments, transfer_moments(m, v, target.pair, (p, q)), strict=True):
                moment.copy_(new)
        target.take(p, q)


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
