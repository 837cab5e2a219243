"""LSP-Offload: Adam in a learned sparse subspace of every matrix.

    S = P^T G Q     delta = Adam(S)     W <- W - lr (scale P delta Q^T + weight_decay W)

P [m, d] and Q [n, d] have r numbers per row (ops/lsp/projector.py); scale makes lr mean the same as for AdamW
(target.py). The gradient G = dY^T X is never computed: the reverse sweep (model/backward/reverse.py) offers dY and X,
both are compressed, and their product is S. Micro-batches accumulate in S. Tensors that are not matrices of a block
(`others`) are trained by plain Adam or frozen, by a setting.

Adam's moments are, per unit (`optimizer_on`, update.py):

    gpu    The weights are updated at once, in the reverse sweep. 8 d^2 bytes per matrix.
    cpu    Gradients and steps are copied while the GPU computes. 12 d^2 bytes per matrix in host memory.
    auto   on the GPU as far as gpu_memory allows, in the order in which the next forward pass needs them: embedding,
           first layers, ...; the rest on the CPU, which has most time for the last layers (arithmetic: memory.py)

max_grad_norm clips the norm of what the optimizer sees: S of all matrices, and the gradients of the others. (The norm
of the whole gradient is unknown, because that gradient is never computed.)

A streamed unit is written back with its update once per step.

What is exact: streamed equals resident to the bit, and a resumed run equals one that was not stopped, each with every
unit's moments in the same place (auto: in the same budget). Different places give the same sum, by two kernels.

Projectors are learned from the gradients of the first batch, one matrix at a time, in an extra backward pass; every
check_freq steps a sample of the matrices is checked again (learn.py).
"""

import time
import weakref
from collections.abc import Callable

import torch

from keyhole.errors import UserError, listed
from keyhole.machine.sizes import GIB
from keyhole.methods import shards
from keyhole.methods.base import Saved, State
from keyhole.methods.frame import Backward, GradientMethod
from keyhole.methods.lsp.adam import MOMENTS, HostAdam
from keyhole.methods.lsp.learn import Check
from keyhole.methods.lsp.memory import place_moments
from keyhole.methods.lsp.target import find_targets
from keyhole.methods.lsp.traits import LSP as ROW
from keyhole.methods.lsp.traits import LSPConfig
from keyhole.methods.lsp.update import SubspaceUpdates
from keyhole.methods.weight_decay import weight_decay_of
from keyhole.model.batch import DeviceBatch
from keyhole.offload.engine import Engine
from keyhole.weak import weakly


class LSP(GradientMethod):
    """Adam in a sparse subspace. `lr` may be changed between steps; with preset="paper" it means the same as in the
    paper."""

    row = ROW
    settings: LSPConfig
    _end: weakref.finalize

    def _setup(self) -> None:
        model, own = self.model, self.settings
        if model.dtype == torch.float16:
            raise UserError("dtype: lsp has no loss scaling, and float16 gradients underflow without; use bfloat16")
        self.units = find_targets(model, own)
        self.targets = {target.tensor.start: target for members in self.units.values() for target in members}
        self._differentiate()
        on_device, decay = place_moments(model, self.units, own), weight_decay_of(model.module, own)
        self.updates = SubspaceUpdates(model, self.units, on_device, own, decay, self.reverse.recorded)
        self.step_count, self.learn_s = 0, 0.0
        self.check: Check | None = None  # of this step, and its seconds
        self.sample: DeviceBatch | None = None  # the micro-batch whose gradients projectors are learned from,
        self.judge = 0  # and the rank that has it
        self._is_flushed = True  # since the last step
        model.methods.attach(self)  # applies updates that another has deferred, before this one sets engine.arrival
        arrival = weakly(self.updates.arrived) if self.updates.owes else None
        model.engine.arrival = arrival or model.engine.arrival
        self._end = weakref.finalize(self, _end, self.updates.host, model.engine, arrival)

    # -- one step --------------------------------------------------------------------------------------------------

    @property
    def backward_passes(self) -> int:
        return 2 if self.settings.checks(self.step_count) else 1

    def _begin(self, own: shards.Share) -> None:
        if self.settings.checks(self.step_count):
            self._flush()
        if self.updates.host is not None:
            self.updates.host.wait_s = self.updates.host.update_s = 0.0
        self.sample, self.judge = own.passes[0], own.first_rank(self.model.ranks)
        self.updates.apply_owed(lambda unit: unit.kind == "table")  # its rows are gathered without an acquire

    def _backward(self, loss: torch.Tensor) -> None:
        """As in every method with gradients: each gradient exists briefly as a whole, and is then compressed. Waits for
        the updates, since your forward would not. (After a step(batch), call flush() before such a forward.)"""
        self._flush()
        self.sample = None
        super()._backward(loss)
        self._flush()

    def _update(self, loss: torch.Tensor, backward: Backward) -> None:
        updates, self.check = self.updates, None
        if updates.is_mixed():  # by what is known without waiting
            self.model.methods.check_whole()
        if self.settings.checks(self.step_count):
            begin_s, asked = time.perf_counter(), (self.targets, self.step_count, updates.moments_of)
            self.check = Check(self.settings, *asked, self.sample, self.model.ranks, self.judge)
            backward(self.check, last=False)
            self.learn_s = time.perf_counter() - begin_s
        self.step_count += 1
        self._is_flushed = False
        updates.begin(self.step_count, self.lr)
        try:
            backward(updates)
            updates.end()
        except BaseException:  # out of memory, an interrupt: updates made so far stay
            updates.broken = bool(updates.current.norms)
            if not updates.broken:
                self.step_count -= 1  # nothing was applied: the next step is this one
            raise

    # -- between steps ---------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Applies all deferred updates: the weights at home are those after the last step."""
        self.updates.apply_owed(lambda unit: True)
        self._is_flushed = True
        self.model.methods.check_whole()

    @property
    def is_whole(self) -> bool:
        """Waits for all updates."""
        if self.updates.host is not None and self._end.alive:
            self.updates.host.drain()
        return not self.updates.is_mixed(wait=True)

    @property
    def deferred(self) -> Callable[[], None]:
        """Works while the method exists and is open: deferred updates are lost with it."""
        return weakly(self._flush_if_open)

    def _flush_if_open(self) -> None:
        if self._end.alive:
            self.flush()

    @property
    def is_settled(self) -> bool:
        """Whether no update can be waiting for the next use of its unit. (Which ones do depends on the pace.)"""
        return self._is_flushed or not self.updates.owes

    @property
    def norm(self) -> torch.Tensor | None:
        """The norm of what the optimizer saw in the last step, unclipped."""
        return self.updates.norm

    def metrics(self) -> dict[str, torch.Tensor | float]:
        """Numbers of the last step. grad_norm: of what the optimizer sees, unclipped; host_wait_s: how long launches
        waited for updates on the host. For a step with a check, means over its matrices: bias_found, of projectors that
        had not seen the batch; bias, of those that the step uses (in-sample if they were fitted just now); learn_s: its
        seconds."""
        found: dict[str, torch.Tensor | float] = {} if self.norm is None else {"grad_norm": self.norm}
        if self.check is not None:
            for key, values in (("bias_found", self.check.found.values()), ("bias", self.check.biases.values())):
                found |= {key: sum(values) / len(values)} if values else {}
            found["learn_s"] = self.learn_s
        host = self.updates.host
        return found if host is None else found | {"host_wait_s": host.wait_s}

    def describe(self) -> list[str]:
        """Lines for the start block: the decisions made."""
        own, updates, tensors = self.settings, self.updates, self.model.layout.tensors
        compressed = [target for target in self.targets.values() if target.p is not None]
        plain = [target for target in self.targets.values() if target.p is None]
        before, after = sum(t.tensor.shape.numel() for t in compressed), sum(t.numel for t in compressed)
        scale = "scaled to AdamW's rates" if own.rule.scaled else "not scaled, as in the paper"
        here, host = sum(updates.device.lengths.values()), updates.host
        away = 0 if host is None else sum(host.lengths.values())
        places = [f"{8 * here / GIB:.2f} GiB in device memory"] if here else []
        places += [f"{8 * away / GIB:.2f} GiB in host memory, updated by the CPU"] if away else []
        lines = [
            f"lsp: {len(compressed)} matrices through ({own.d}, {own.r})-sparse projectors ({own.rule.kind}): "
            f"{before:,} weights seen as {after:,}; steps {scale}; Adam's moments: {' and '.join(places)}"
        ]
        clamped = [target for target in compressed if min(target.tensor.shape) <= own.d]
        clamped += [target for target in plain if target.tensor.block is not None and len(target.tensor.shape) == 2]
        if clamped:
            lines.append(f"lsp: d = {own.d} is more than a side of {len(clamped)} matrices has: nothing is lost there")
        if stacks := [target for target in plain if len(target.tensor.shape) > 2]:
            lines.append(f"lsp: {len(stacks)} stacks of matrices (experts) are trained by plain Adam, not compressed")
        frozen = [tensor.name for tensor in tensors if not tensor.param.requires_grad]
        lines += [f"lsp: not trained: {listed(frozen)}"] if frozen else []
        lines += [f"lsp: by plain Adam: {listed([target.name for target in plain])}"] if plain else []
        return lines + self.dropout.describe()

    def _state(self) -> State:
        """Flushes. Saves the numbers of projectors; their positions are drawn again from the seed."""
        self.flush()
        state: State = {"step_count": self.step_count, "seed": self.settings.seed, **self.dropout.state_dict()}
        for target in self.targets.values():
            place = self.updates.place_of(target.unit)
            state |= {f"{target.name}/{key}": m for key, m in zip(MOMENTS, place.of(target), strict=True)}
            state[f"{target.name}/step"] = int(place.counts[target.name])
            if target.p is not None:
                state |= {f"{target.name}/{side}": each.values_Rr for side, each in zip("pq", target.pair, strict=True)}
                state[f"{target.name}/generation"] = target.generation
        return state

    def _load(self, state: Saved) -> None:
        """Loads moments into their places here, wherever they were when they were saved."""
        if self.reverse.recorded is not None:
            self.reverse.recorded.forget()
        self.dropout.load_state_dict(state)
        self.flush()
        self.step_count = int(state["step_count"])
        for target in self.targets.values():
            if f"{target.name}/exp_avg" not in state:
                raise UserError(f"the optimizer state has no {target.name}, which this run trains")
            if target.p is not None:
                target.restore(state, self.model.device)
            place = self.updates.place_of(target.unit)
            for key, moment in zip(MOMENTS, place.of(target), strict=True):
                moment.copy_(state[f"{target.name}/{key}"])
            place.counts[target.name].fill_(int(state[f"{target.name}/step"]))


def _end(host: HostAdam | None, engine: Engine, arrival: object) -> None:
    if host is not None:
        host.pool.close()
    if arrival is not None and engine.arrival is arrival:  # not that of a later method
        engine.arrival = None
