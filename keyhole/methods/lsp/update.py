"""From complete gradients to updated weights: what follows when the sink (sink.py) has all gradients of a unit.

Depending on where the moments of the unit are,

    device (adam.py)     the weights are updated at once, while the unit is on the device
    host (adam.py)       the gradients of a block are sent to the host, and the step returns. A resident unit is updated
                         as soon as it has arrived, at the latest at its use in the next forward pass; a streamed unit
                         is updated at that use

Each unit has its moments in one of the two places (memory.py chooses); nothing else differs, so every mixture of places
computes the same mathematics, and a state saved from one can be loaded into another.

Clipping needs the global norm, which is known at the end of the backward pass; every unit then *lacks* its update
until its next use. Nothing is stale either way.

If a gradient is not finite, its unit stays unchanged, on the host its block (`check`: whether the run can go on); with
clipping the global norm decides.

On several ranks the compressed gradients of a unit, d x d numbers per matrix, are summed over the ranks in float32, in
their order, when it is finished. Each rank has all moments, and makes the same update in its slot, of which it writes
back its part. A target without a gradient on any rank stays unchanged, as in one process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch

from keyhole import ops
from keyhole.machine.sizes import GIB
from keyhole.methods.lsp.adam import DecidingNorm, DeviceAdam, HostAdam
from keyhole.methods.lsp.memory import group_of
from keyhole.methods.lsp.sink import GradientBuffers, GradientSink, LSPStep
from keyhole.methods.lsp.target import Target, Targets, assign_places
from keyhole.methods.lsp.traits import LSPConfig
from keyhole.methods.shards import of_any_rank
from keyhole.methods.step_numbers import Flags, StepNumbers
from keyhole.methods.weight_decay import WeightDecay
from keyhole.methods.work import check_host_memory
from keyhole.model.backward.recorded import RecordedBlocks
from keyhole.model.model import Model
from keyhole.model.structure.layout import Unit
from keyhole.model.weights.homes import view
from keyhole.ops.arguments import Number


@dataclass
class DeferredUpdate:
    """The update of a unit whose gradients are complete and whose weights are not updated yet."""

    targets: list[Target]
    step: LSPStep


class SubspaceUpdates(GradientSink):
    """The optimizer of all targets, by unit. on_device: units whose moments are there."""

    def __init__(
        self,
        model: Model,
        units: Targets,
        on_device: set[int],
        own: LSPConfig,
        decay: WeightDecay,
        recorded: RecordedBlocks | None = None,
    ) -> None:
        self.model, self.own, self.decay, self.recorded, self.ranks = model, own, decay, recorded, model.ranks
        rule = {"beta1": own.beta1, "beta2": own.beta2, "eps": own.eps}
        self.numbers = None if recorded is None else StepNumbers(model.device)
        self.measured: dict[tuple[int, int], torch.Tensor] = {}  # norms, at fixed addresses for CUDA graphs
        self.decided = torch.zeros(2, device=model.device)  # clip and skip of the last step, for what lacks it
        self.units, lengths = units, assign_places(units)
        device_units = {unit: members for unit, members in units.items() if unit in on_device}
        host_units = {unit: members for unit, members in units.items() if unit not in on_device}
        groups = {unit: group_of(model.layout.units[unit]) for unit in units}
        device = DeviceAdam(device_units, lengths, rule, model.device, self.clips)
        gradients = GradientBuffers(lengths, groups, model.device, count=2 if host_units else 1)
        super().__init__(units, lengths, gradients, device)
        self.host: HostAdam | None = None
        if host_units:
            state = 12 * sum(lengths[unit] for unit in host_units)
            keeps = f"lsp (less: lsp.d, lsp.others=frozen) keeps {state / GIB:.2f} GiB of moments and gradients"
            check_host_memory(keeps, state)
            self.host = HostAdam(host_units, lengths, rule, groups, model.engine, own.threads)
        self.rates_K2 = torch.zeros(len(self.targets), 2, device=model.device)  # of this step, for CUDA graphs
        self.place_in_rates = {target.name: k for k, target in enumerate(self.targets.values())}
        self.unchecked: list[LSPStep] = []  # of which it is not known yet whether they were applied to all units
        self.broken = (
            False  # an error came after units had received gradients, or a step is known to be applied in part
        )
        self.deferred: dict[int, DeferredUpdate] = {}
        self.complete: dict[int, tuple[DeferredUpdate, torch.Tensor]] = {}  # for the host, not sent yet
        self.norm: torch.Tensor | None = None

    def place_of(self, unit: int) -> DeviceAdam | HostAdam:
        """The optimizer that has the unit's moments."""
        return self.device if unit in self.device.lengths else self.at_host

    @property
    def at_host(self) -> HostAdam:
        """The optimizer of units whose moments are in host memory, if there are any."""
        assert self.host is not None
        return self.host

    def moments_of(self, target: Target) -> list[torch.Tensor]:
        """m and v of a target, as views, wherever they are. Drain first."""
        return self.place_of(target.unit).of(target)

    @property
    def clips(self) -> bool:
        return self.own.max_grad_norm is not None

    @property
    def owes(self) -> bool:
        """Whether updates may be deferred until a unit's next use."""
        return self.host is not None or self.clips

    # -- gradients are complete ------------------------------------------------------------------------------------

    def begin(self, number: int, lr: float) -> None:
        """Called before a backward pass."""
        self.current, self.complete = LSPStep(number, lr), {}
        self.received.clear()
        if self.numbers is not None:
            self.numbers.set(lr, number)
            rates = [target.rates(lr, self._decay_of(target)) for target in self.targets.values()]
            self.rates_K2.copy_(torch.tensor(rates, pin_memory=self.rates_K2.is_cuda), non_blocking=True)
        if self.host is not None:
            self.current.host_norms = self.at_host.down.numbers(len(self.model.layout.units) + 1)

    @torch.no_grad()
    def finished(self, unit: Unit) -> bool:
        """The unit's gradients are complete: updates its weights now, or defers the update."""
        step, page = self.current, unit.index
        targets, weights = self._complete(unit)
        if not targets:
            return False
        grad, update = self.buffer(page), DeferredUpdate(targets, step)
        if self.ranks.several:
            grad.copy_(self.ranks.sum(grad))
        if self.place_of(page) is self.host:
            self._collect(page, update, grad)
            return False
        moves, numbers = not self.clips, self._numbers_of(update)

        measured = torch.empty(len(targets) + 2, device=grad.device)  # of this step: norms of targets, of unit, skip
        if self.recorded is not None:
            measured = self.measured.setdefault((page, len(targets)), measured)
        norms, norm, skip = measured[:-2], measured[-2], measured[-1]

        def measure() -> None:
            torch.stack(ops.norms([target.view_in(grad) for target in targets]), out=norms)
            torch.linalg.vector_norm(norms, out=norm)
            skip.copy_(~torch.isfinite(norm))
            if moves:
                self.device.deltas_(targets, grad, None, skip)
                self._apply(update, grad, weights, numbers)

        self._maybe_recorded(page, update, [grad, *weights, measured], measure)
        step.norms |= zip((target.tensor.start for target in targets), norms, strict=True)
        if self.clips:
            self.deferred[page] = update
        else:
            step.skips.append(skip)
            self.gradients.done(page)
        return moves

    def _complete(self, unit: Unit) -> tuple[list[Target], list[torch.Tensor]]:
        """The targets of a unit that have a gradient, on any rank, and their weights. One that is missing on this rank
        is zero."""
        page, received = unit.index, self.received
        members = self.units.get(page, [])
        targets = [target for target in members if target.name in received]
        if self.ranks.several:
            targets = of_any_rank(self.ranks, members, [target.name in received for target in members])
            for target in (one for one in targets if one.name not in received):
                target.view_in(self.buffer(page)).zero_()
                w = self.model.engine.held[page].as_page(self.model.engine.homes[page])
                received[target.name] = (target.tensor, view(w, target.tensor, unit.start))
        return targets, [received.pop(target.name)[1] for target in targets]

    def _maybe_recorded(
        self, page: int, update: DeferredUpdate, at: list[torch.Tensor], run: Callable[[], None], kind: str = "finished"
    ) -> None:
        """run(), captured as a CUDA graph if possible; `at`: tensors that it reads and writes."""
        if self.recorded is None or self._numbers_of(update) is None:
            run()
            return
        targets = tuple((target.name, target.identity) for target in update.targets)
        key = (kind, page, targets, tuple(tensor.data_ptr() for tensor in at))
        self.recorded.update(key, run)

    def _collect(self, page: int, update: DeferredUpdate, grad: torch.Tensor) -> None:
        """Gradients for the host are sent when those of a whole block are complete (host.py), or when the next block
        begins. Steps that have returned are applied with every unit: there are few slots for them."""
        groups = self.at_host.groups
        if groups[next(iter(self.complete), page)] != groups[page]:
            self._send_complete()
        self.complete[page] = update, grad
        if len(self.complete) == self.at_host.group_sizes[groups[page]]:
            self._send_complete()
        if not self.clips:
            self._apply_arrived()
            for other in [p for p in self.deferred if p not in self.model.engine.streamed and self.at_host.idle]:
                self.at_host.fetch(other)

    def _send_complete(self) -> None:
        """Sends the gradients that are complete, all of one group, to the host."""
        complete, self.complete = self.complete, {}
        if not complete:
            return
        step, first = self.current, next(iter(complete))
        found = [(target, grad) for update, grad in complete.values() for target in update.targets]
        norms = ops.norms([target.view_in(grad) for target, grad in found])
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        step.norms |= zip((target.tensor.start for target, _ in found), norms, strict=True)
        grads = [(grad, self.at_host.staging[page]) for page, (_, grad) in complete.items()]
        self.at_host.down.send_all([(norm, step.host_norms[first]), *grads])
        self.gradients.done(*complete, stream=self.at_host.down.stream)
        self.model.engine.bytes_down += 4 * sum(self.at_host.lengths[page] for page in complete)
        self.deferred |= {page: update for page, (update, _) in complete.items()}
        if not self.clips:
            self._submit(list(complete), step.host_norms[first])

    def _submit(self, pages: list[int], norm: torch.Tensor) -> None:
        """Queues the update of pages of one group."""
        step = self.deferred[pages[0]].step
        step.submitted += 1
        deciding = DecidingNorm(norm, self.own.max_grad_norm, step.outcomes)
        self.at_host.submit({page: self.deferred[page].targets for page in pages}, deciding)

    @torch.no_grad()
    def end(self) -> None:
        """The backward pass is over: the norm of all that the optimizer sees is known."""
        self._send_complete()
        step = self.current
        self.norm = step.norm()
        if not self.clips:
            step.report = Flags(*step.skips) if step.skips else None
            self.unchecked.append(step)
            if self.host is not None:  # slots are now for what the forward pass needs first
                self._apply_arrived()
                self._fetch_next()
            return
        if self.norm is None or self.own.max_grad_norm is None:
            return
        clip, skip = self.decided
        clip.copy_((self.own.max_grad_norm / (self.norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0))
        skip.copy_(~torch.isfinite(self.norm))
        if self.host is not None:
            self.host.down.send(self.norm, step.host_norms[-1])
            sent = [page for page in self.deferred if self.place_of(page) is self.host]
            for _, pages in groupby(sent, self.host.groups.__getitem__):
                self._submit(list(pages), step.host_norms[-1])

    # -- weights are updated ---------------------------------------------------------------------------------------

    def _apply_arrived(self) -> None:
        """Applies steps that have returned to resident units, during a backward pass."""
        engine = self.model.engine
        for page in [p for p in self.at_host.coming if p in self.deferred and p not in engine.streamed]:
            engine.acquire(page)

    def arrived(self, page: int, w: torch.Tensor) -> bool:
        """Called by the engine with a page that is about to be used: applies its deferred update."""
        update = self.deferred.pop(page, None)
        if update is None:
            return False
        unit, on_device = self.model.layout.units[page], self.place_of(page) is self.device
        delta = self.device.waiting[page] if on_device else self.at_host.deltas(page)
        weights = [view(w, target.tensor, unit.start) for target in update.targets]
        numbers = self._numbers_of(update)

        def move() -> None:
            if on_device:
                self.device.deltas_(update.targets, delta, *self.decided)
            self._apply(update, delta, weights, numbers)

        with torch.no_grad():
            self._maybe_recorded(page, update, [delta, *weights], move, "arrived") if on_device else move()
        if not on_device:
            self.at_host.used(page)
            self.model.engine.bytes_up += 4 * self.at_host.lengths[page]
            self._fetch_next()
        return True

    def _fetch_next(self) -> None:
        """Uploads the steps that the forward pass needs next, if the host has them: the last ones of the reverse."""
        for page in reversed(self.deferred):
            if self.place_of(page) is self.host and not self.at_host.fetch(page):
                return

    def _decay_of(self, target: Target) -> float:
        return self.decay.of(target.tensor.param)

    def _numbers_of(self, update: DeferredUpdate) -> StepNumbers | None:
        """The numbers on the device, if they are of the update's step, and complete (the decay of a plain tensor is not
        among them), and kernels read them (those of free projectors do not)."""
        plain = (target for target in update.targets if target.p is None)
        fits = update.step is self.current and not any(self._decay_of(target) for target in plain)
        fits = fits and all(target.is_one_stage for target in update.targets)
        return self.numbers if fits else None

    def _apply(
        self, update: DeferredUpdate, deltas: torch.Tensor, weights: list[torch.Tensor], numbers: StepNumbers | None
    ) -> None:
        lr, number = update.step.lr, update.step.number if numbers is None else numbers.step
        how = {"rounding": self.own.rounding, "seed": self.own.seed, "step": number}
        for target, w in zip(update.targets, weights, strict=True):
            rates: tuple[Number, Number] = target.rates(lr, self._decay_of(target))
            if numbers is not None:
                first, second = self.rates_K2[self.place_in_rates[target.name]]
                rates = (first, 0.0 if target.p is None else second)
            target.apply(w, target.view_in(deltas), rates, how)

    def apply_owed(self, wanted: Callable[[Unit], bool]) -> None:
        """Applies the deferred updates of units that are `wanted`."""
        units, engine = self.model.layout.units, self.model.engine
        pages = [page for page in sorted(self.deferred) if wanted(units[page])]
        if pages:
            with engine.sweep("deferred", pages):
                for page in pages:
                    engine.acquire(page)
                    engine.release(page)

    # -- between steps ---------------------------------------------------------------------------------------------

    def is_mixed(self, wait: bool = False) -> bool:
        """Whether a step was applied in part: reads what is known by now. wait: also the rest; drain first.

        Without clipping a unit is updated before the gradients of others are known. A non-finite gradient leaves its
        unit unchanged, moments included; of units with moments on the host, a whole block. If that happened to some
        units and not to others, the weights mix two steps, and the run must stop. With clipping the global norm decides
        for all of them."""
        while self.unchecked and (wait or self.unchecked[0].is_known()):
            self.broken = self.unchecked.pop(0).is_mixed() or self.broken
        return self.broken
