"""LSP-Offload: Adam in a learned sparse subspace of every matrix.

    S = P^T G Q     delta = Adam(S)     W <- W - lr (scale P delta Q^T + weight_decay W)

P [m, d] and Q [n, d] have r numbers per row (ops/lsp/projector.py); scale makes lr mean the same as for AdamW
(target.py). The gradient G = dY^T X is never computed: the reverse sweep (model/backward/reverse.py) offers dY and X,
both are compressed, and their product is S. Micro-batches accumulate in S. Tensors that are not matrices of a block
(`others`) are trained by plain Adam or frozen, by a setting.

Adam's moments are, per unit (`optimizer_on`, update.py):

    gpu    adam.py. The weights are updated at once, in the reverse sweep. 8 d^2 bytes per matrix.
    cpu    host.py. Gradients and steps are copied while the GPU computes. 12 d^2 bytes per matrix in host memory.
    auto   on the GPU as far as gpu_memory allows, in the order in which the next forward pass needs them: embedding,
           first layers, ...; the rest on the CPU, which has most time for the last layers (arithmetic: memory.py)

max_grad_norm clips the norm of what the optimizer sees: S of all matrices, and the gradients of the others. (The norm
of the whole gradient is unknown, because that gradient is never computed.)

A streamed unit is written back with its update once per step. (Keeping the host's weights unchanged and summing the
deltas since the last change of projectors would save these writes. But uploads are the bottleneck, and each use of the
unit would then upload the sum of its deltas too; and resident weights, rounded in place, would have other bits.)

What is exact: streamed equals resident to the bit, and a resumed run equals one that was not stopped, each with every
unit's moments in the same place (auto: in the same budget). Different places give the same sum, by two kernels.

Projectors are learned from the gradients of the first batch, one matrix at a time, in an extra backward pass; every
check_freq steps a sample of the matrices is checked again (learn.py).

On several ranks: shards.py.
"""

import time
import weakref
from collections.abc import Callable, Sequence

import torch

from keyhole.disk.tensors import Ranges, range_of
from keyhole.errors import UserError
from keyhole.machine.sizes import GIB
from keyhole.methods import shards
from keyhole.methods.base import Saved, State
from keyhole.methods.dropout import ModelDropout
from keyhole.methods.frame import Backward, GradientMethod
from keyhole.methods.lsp.adam import MOMENTS
from keyhole.methods.lsp.host import HostAdam
from keyhole.methods.lsp.learn import Check, Learning
from keyhole.methods.lsp.memory import place_moments
from keyhole.methods.lsp.shards import SharedCheck, SharedUpdates
from keyhole.methods.lsp.target import Target, find_targets
from keyhole.methods.lsp.traits import LSP as ROW
from keyhole.methods.lsp.traits import LSPConfig
from keyhole.methods.lsp.update import SubspaceUpdates
from keyhole.methods.weight_decay import weight_decay_of
from keyhole.model.backward.reverse import Reverse
from keyhole.model.batch import Batch, DeviceBatch
from keyhole.offload.engine import Engine
from keyhole.weak import weakly


class LSP(GradientMethod):
    """Adam in a sparse subspace. `lr` may be changed between steps; with preset="paper" it means the same as in the
    paper."""

    row = ROW
    settings: LSPConfig

    def _setup(self) -> None:
        model, own = self.model, self.settings
        if model.dtype == torch.float16:
            raise UserError("dtype: lsp has no loss scaling, and float16 gradients underflow without; use bfloat16")
        if model.sharded:
            shards.check(own)
        self.learning = Learning(own, model.device)
        self.units = find_targets(model, own)
        self.targets = {target.tensor.start: target for members in self.units.values() for target in members}
        self.reverse = Reverse(
            model, activations=own.activations, compiled=own.compile, deterministic=own.deterministic
        )
        self.dropout = ModelDropout(model, own.seed, own.model_dropout)
        asked = model, self.units, place_moments(model, self.units, own), own, weight_decay_of(model.module, own)
        self.updates = SharedUpdates(*asked) if model.sharded else SubspaceUpdates(*asked, self.reverse.recorded)
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
    def sweeps(self) -> int:
        return 2 if self.learning.is_due(self.step_count) else 1

    def _begin(self, batch: Batch | Sequence[Batch], batches: list[DeviceBatch]) -> None:
        self.updates.check()
        if self.learning.is_due(self.step_count):
            self._flush()
        if self.updates.host is not None:
            self.updates.host.wait_s = self.updates.host.update_s = 0.0
        self.sample, self.judge = next(iter(batches), None), shards.first_rank(self.model, batch)
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
        updates.check()
        if self.learning.is_due(self.step_count):
            begin_s, asked = time.perf_counter(), (self.learning, self.targets, self.step_count)
            if isinstance(updates, SharedUpdates):
                self.check = SharedCheck(*asked, updates, self.judge)
            else:
                self.check = Check(*asked, updates.moments_of)
            if self.sample is not None:
                self.check.know(self.sample)
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
        """Applies all owed updates: the weights at home are those after the last step."""
        self.updates.check()
        self.updates.apply_owed(lambda unit: True)
        self.updates.drain()
        self._is_flushed = True
        self.updates.check(wait=True)

    @property
    def deferred(self) -> Callable[[], None]:
        """Works while the method exists and is open: owed updates are lost with it."""
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
            found |= {"bias_found": _mean(self.check.found)} if self.check.found else {}
            found |= {"bias": _mean(self.check.biases)} if self.check.biases else {}
            found["learn_s"] = self.learn_s
        host = self.updates.host
        return found if host is None else found | {"host_wait_s": host.wait_s}

    def describe(self) -> list[str]:
        """Lines for the start block."""
        return describe_targets(list(self.targets.values()), self.settings, self.updates) + self.dropout.describe()

    def _state(self) -> State:
        """Flushes. Saves the numbers of projectors; their positions are drawn again from the seed."""
        self.flush()
        state: State = {"step_count": self.step_count, "seed": self.settings.seed, **self.dropout.state_dict()}
        for target in self.targets.values():
            place = self.updates.place_of(target.unit)
            for key, moment in zip(MOMENTS, self.updates.moments_of(target), strict=True):
                state[f"{target.name}/{key}"] = self._as_saved(target, moment)
            state[f"{target.name}/step"] = place.count(target)
            if target.p is not None:
                state |= {f"{target.name}/{side}": each.values_Rr for side, each in zip("pq", target.pair, strict=True)}
                state[f"{target.name}/generation"] = target.generation
        return state

    def _load(self, state: Saved) -> None:
        """Loads moments into their places here, wherever they were when they were saved."""
        if self.reverse.recorded is not None:
            self.reverse.recorded.forget()
        if state["seed"] != self.settings.seed:
            raise UserError(f"seed: the checkpoint was made with {state['seed']}, this run has {self.settings.seed}")
        self.dropout.load_state_dict(state)
        self.flush()
        self.step_count = int(state["step_count"])
        for target in self.targets.values():
            if f"{target.name}/exp_avg" not in state:
                raise UserError(f"the optimizer state has no {target.name}, which this run trains")
            if target.p is not None:
                self.learning.restore(target, state)
            place = self.updates.place_of(target.unit)
            for moment, key in zip(place.moments(target), MOMENTS, strict=True):
                moment.copy_(self._of_saved(target, state, f"{target.name}/{key}"))
            place.set_count(target, int(state[f"{target.name}/step"]))

    def _as_saved(self, target: Target, moment: torch.Tensor) -> torch.Tensor | Ranges:
        if not isinstance(self.updates, SharedUpdates):
            return moment
        begin, _ = self.updates.own_place(target)
        return Ranges(target.shape, moment.dtype, [(begin, moment)] if moment.numel() else [])

    def _of_saved(self, target: Target, state: Saved, key: str) -> torch.Tensor:
        if not isinstance(self.updates, SharedUpdates):
            found: torch.Tensor = state[key]
            return found
        return range_of(state, key, *self.updates.own_place(target))

    def close(self) -> None:
        """Ends the worker. Flush first."""
        self._end()


def _mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values)


def _end(host: HostAdam | None, engine: Engine, arrival: object) -> None:
    if host is not None:
        host.close()
    if arrival is not None and engine.arrival is arrival:  # not that of a later method
        engine.arrival = None


def describe_targets(targets: list[Target], own: LSPConfig, updates: SubspaceUpdates) -> list[str]:
    """Lines for the start block: the decisions made."""
    compressed = [target for target in targets if target.p is not None]
    plain = [target for target in targets if target.p is None]
    before = sum(target.tensor.shape.numel() for target in compressed)
    after = sum(target.numel for target in compressed)
    d, kind = own.d, compressed[0].kind if compressed else "none"
    scale = "scaled to AdamW's rates" if own.rule.scaled else "not scaled, as in the paper"
    lines = [
        f"lsp: {len(compressed)} matrices through ({d}, {own.r})-sparse projectors ({kind}): {before:,} weights "
        f"seen as {after:,}; steps {scale}; {_describe_moments(updates)}"
    ]
    clamped = [target for target in compressed if min(target.tensor.shape) <= d]
    clamped += [target for target in plain if target.tensor.block is not None and len(target.tensor.shape) == 2]
    if clamped:
        lines.append(f"lsp: d = {d} is more than a side of {len(clamped)} matrices has: nothing is lost there")
    stacks = [target for target in plain if len(target.tensor.shape) > 2]
    if stacks:
        lines.append(f"lsp: {len(stacks)} stacks of matrices (experts) are trained by plain Adam, not compressed")
    frozen = [t.name for t in updates.model.layout.tensors if not t.param.requires_grad]
    lines += [f"lsp: not trained: {_names(frozen)}"] if frozen else []
    return lines + ([f"lsp: by plain Adam: {_names([target.name for target in plain])}"] if plain else [])


def _describe_moments(updates: SubspaceUpdates) -> str:
    on_device = sum(updates.device.lengths.values())
    on_host = 0 if updates.host is None else sum(updates.host.lengths.values())
    places = [f"{8 * on_device / GIB:.2f} GiB in device memory"] if on_device else []
    places += [f"{8 * on_host / GIB:.2f} GiB in host memory, updated by the CPU"] if on_host else []
    units = updates.model.layout.units
    first = [units[unit].name for unit in updates.lengths if unit not in updates.device.lengths]
    return f"Adam's moments: {' and '.join(places)}" + (f" (from {first[0]} on)" if on_device and on_host else "")


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
