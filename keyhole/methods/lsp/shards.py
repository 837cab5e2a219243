"""LSP on several ranks: ranks sum compressed gradients instead of full ones, and each has a part of the moments.

Weights are sharded as for other methods (methods/shards.py); blocks and head are gathered when they are visited. For a
unit with n numbers that the optimizer sees (d x d per matrix), N ranks,

    S_r = sum over ranks of their S, this rank's n / N           exchanged, added up in the order of ranks
    delta_r = Adam(S_r)                                          on the device or on the host, as in one process
    delta <- delta_r of all ranks, gathered                      when the unit is updated: at once, or at its next use
    W <- W + lr scale P delta Q^T                                by every rank, in its slot; its part is written back

so 2 n (N - 1) / N float32 numbers per rank and step are exchanged instead of the gradient, and moments take 8 n / N
bytes. Targets without a gradient on any rank stay unchanged, as in one process. All ranks place and update units alike,
so nothing here may depend on timing: a unit whose steps return early waits for its next use.

Projectors are learned from the step's first micro-batch, as in one process, by the rank that has it. (A matrix that is
not used by a linear layer has a complete gradient over all micro-batches, which is first summed over ranks.) The other
ranks receive the numbers (r per row and side), so all ranks have the same bits; all draw positions from the seed.
"""

from typing import Any

import torch

from keyhole.methods.lsp.learn import Check, Learning, Moments, Verdict
from keyhole.methods.lsp.target import Share, Target, Targets, view_in
from keyhole.methods.lsp.traits import LSPConfig
from keyhole.methods.lsp.update import SubspaceUpdates
from keyhole.methods.shards import of_any_rank
from keyhole.methods.weight_decay import WeightDecay
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Unit
from keyhole.model.weights.homes import view
from keyhole.ops.lsp.projector import Projector


class SharedUpdates(SubspaceUpdates):
    """The optimizer, of which this rank has a part."""

    def __init__(self, model: Model, units: Targets, on_device: set[int], own: LSPConfig, decay: WeightDecay) -> None:
        self.ranks = model.ranks
        share = Share(model.ranks.rank, model.ranks.size)
        super().__init__(model, units, on_device, own, decay, share=share)
        self.steps = torch.empty(max(self.lengths.values()), device=model.device)  # of one unit, from all ranks

    def buffer(self, unit: int) -> torch.Tensor:
        return self.gradients.of(unit)

    def _complete(self, unit: Unit) -> tuple[list[Target], list[torch.Tensor]]:
        """The targets for which any rank has a gradient; a gradient missing on this rank is zero."""
        page, step = unit.index, self.current
        members = sorted(self.units.get(page, []), key=lambda target: target.begin)
        received = step.received.pop(page, {})
        targets = of_any_rank(self.ranks, members, [target.name in received for target in members])
        for target in targets:
            if target.name not in received:
                view_in(self.buffer(page), target).zero_()
        return targets, [self._weight(unit, target) for target in targets]

    def _weight(self, unit: Unit, target: Target) -> torch.Tensor:
        known = self.current.weights.pop(target.name, None)
        engine: Any = self.model.engine  # of shards
        return view(engine.on_device(unit.index), target.tensor, unit.start) if known is None else known

    def _total(self, page: int) -> torch.Tensor:
        part = self.ranks.sum_of_parts(self.buffer(page))
        if page not in self.device.waiting:
            return part
        self.gradients.done(page)
        return self.device.waiting[page].copy_(part)

    def _norms_of(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        own = torch.stack([torch.linalg.vector_norm(grad) for grad in grads])
        return list(torch.linalg.vector_norm(self.ranks.gather(own), dim=0).unbind())

    def _all_of(self, page: int, deltas: torch.Tensor) -> torch.Tensor:
        found = self.steps[: self.lengths[page]]
        self.ranks.gather_into(found, deltas)
        return found

    def _apply_arrived(self) -> None:
        """Does nothing: which steps have returned depends on timing."""

    # -- moments, for checks and checkpoints -----------------------------------------------------------------------

    def all_moments(self, target: Target) -> Moments:
        """m and v of a target, from all ranks. Called by all of them."""
        place, found = self.place_of(target.unit), []
        for part in place.states.of(target.unit):
            whole = torch.empty(self.lengths[target.unit], device=part.device)
            self.ranks.gather_into(whole, part)
            found.append(view_in(whole, target))
        m, v = found
        return m, v

    def set_moments(self, target: Target, moments: Moments) -> None:
        """Stores this rank's part of them."""
        for own, whole in zip(self.moments_of(target), moments, strict=True):
            own.copy_(self.own_range(target, whole.reshape(-1)))

    def own_range(self, target: Target, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of the numbers of a target."""
        begin, numel = self.own_place(target)
        return flat[begin : begin + numel]

    def own_place(self, target: Target) -> tuple[int, int]:
        """The index in the target of this rank's first number, and the number of numbers."""
        length = self.share.numel(self.lengths[target.unit])
        begin, end = self.share.range_of(target, length)
        return self.share.first_in(target, length), end - begin


class SharedCheck(Check):
    """Verdicts come from the rank that has the first micro-batch (`judge`); all ranks apply them per finished unit."""

    def __init__(
        self, learning: Learning, targets: dict[int, Target], step_count: int, updates: SharedUpdates, judge: int
    ) -> None:
        super().__init__(learning, targets, step_count, updates.moments_of)
        self.updates, self.judge = updates, judge
        self.asked: dict[int, list[int]] = {}  # unit -> matrices to be checked
        for start in sorted(self.wanted):
            self.asked.setdefault(targets[start].unit, []).append(start)
        self.complete: dict[int, torch.Tensor] = {}  # gradients of this rank's micro-batches
        self.verdicts: dict[int, Verdict] = {}

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        return super().linear(tensor, w_OI, dy_MO, x_MI) if self.updates.ranks.rank == self.judge else True

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        if tensor.start in self.wanted:
            self.complete[tensor.start] = grad.detach()

    def _decided(self, target: Target, verdict: Verdict) -> None:
        self.verdicts[target.tensor.start] = verdict

    @torch.no_grad()
    def finished(self, unit: Unit) -> bool:
        starts = self.asked.pop(unit.index, [])
        if starts:
            self._judge_sums(starts)
            sent = self.updates.ranks.from_rank(self.judge, lambda: {s: self._sent(s) for s in starts})
            for start in starts:
                if (verdict := sent[start]) is not None:
                    super()._decided(self.targets[start], self._received(self.targets[start], *verdict))
        return False

    def _judge_sums(self, starts: list[int]) -> None:
        """Sums over ranks, and judges, the matrices whose gradients came as tensors."""
        ranks = self.updates.ranks
        for start in of_any_rank(ranks, starts, [start in self.complete for start in starts]):
            tensor = self.targets[start].tensor
            own = self.complete.pop(start, None)
            total = ranks.sum(torch.zeros(tensor.shape, device=self.learning.device) if own is None else own)
            if ranks.rank == self.judge:
                self._check(tensor, [total])

    def _sent(self, start: int) -> tuple[Any, ...] | None:
        verdict = self.verdicts.pop(start, None)
        if verdict is None:
            return None
        values = None if verdict.taken is None else [side.values_Rr.cpu() for side in verdict.taken]
        return verdict.found, verdict.bias, values

    def _received(self, target: Target, found: float | None, bias: float, values: Any) -> Verdict:
        if values is None:
            return Verdict(found, bias)
        drawn = target.pair if self._is_first(target) else self.learning.draw(target)
        p, q = (side.with_values(new.to(self.learning.device)) for side, new in zip(drawn, values, strict=True))
        return Verdict(found, bias, (p, q))

    def _carry_moments(self, target: Target, p: Projector, q: Projector) -> None:
        self.updates.set_moments(target, self._carried(self.updates.all_moments(target), target, p, q))
