"""What a method is: the class that the training loop, checkpoints and users call.

A method lives in one folder:

    traits.py    its settings (settings.py), and its row (traits.py): rates, formats, what may change on resume
    method.py    a subclass of Method (more files as needed)
    memory.py    the bytes and the work that it needs, as functions of shapes (workload.py)

It has one line in the table of methods/__init__.py. A subclass names its row and defines `_setup`, `_step`, `_state`,
`_load`, and what it needs of the rest. The functions that users call are here: they run in the model's dtype, with
gradients, whatever the caller has switched on; take up what the caller has changed by hand, or refuse it; and tell the
model what has happened (model/attached.py). The settings are fixed; `lr` may be changed between steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn

from keyhole.disk.tensors import MethodState
from keyhole.errors import UserError, listed
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.methods.settings import Around, MethodSettings, check_values, checked_rate
from keyhole.methods.torch_optimizer import TorchOptimizer
from keyhole.methods.traits import Traits
from keyhole.model.attached import Addon
from keyhole.model.batch import Batch
from keyhole.model.model import Model
from keyhole.model.structure.layout import Layout, Unit
from keyhole.offload.workers import WorkerFailed
from keyhole.ops.autocast import computing, with_gradients
from keyhole.weak import Closable, leaves_no_frames

State = dict[str, Any]
Saved = MethodState  # a state as it is loaded
METHOD, TENSORS = "method", "tensors"  # in a state: the name of its method, and the fingerprint of its model's tensors


@dataclass
class Skeleton:
    """A model by its modules and shapes, without weights."""

    module: nn.Module
    layout: Layout
    blocks: list[nn.Module]


class Method(Closable):
    """An update rule on a model."""

    row: ClassVar[Traits]
    name: str
    model: Model
    lr: float
    settings: MethodSettings
    # Whether this method, with its settings, never changes the weights of blocks, so that they may be frozen.
    keeps_base: bool = False
    # What an optimizer of torch trains for it, by name; None: the model's own parameters that require gradients.
    params: dict[str, nn.Parameter] | None = None
    # Whether parameters may be frozen between its steps: it trains what gets a gradient.
    may_freeze: bool = True
    _torch_optimizer: TorchOptimizer | None = None
    _end: weakref.finalize | None = None  # of what works for it on the host

    @leaves_no_frames
    def __init__(self, model: Model | None = None, lr: float | str | None = None, **settings: Any) -> None:
        row = self.row
        if not isinstance(model, Model):
            found = "nothing" if model is None else f"a {type(model).__name__}"
            raise UserError(
                f"{row.name}: found {found}, expected the model that keyhole.load returns: "
                f'keyhole.{type(self).__name__}(keyhole.load("path-or-hub-id"), lr=...)'
            )
        check_values(row.settings, settings, row.section)
        model.methods.check_new(row.name)
        self.name, self.model = row.name, model
        self.settings = row.settings(**settings).filled()
        self.lr = checked_rate(row.rates(self.settings)[0] if lr is None else lr)
        around = Around(model.formats.name, "stream" if model.engine.streamed else "resident")
        for key, why in self.settings.faults(around):
            raise UserError(f"{key}: {why}")
        with computing(), with_gradients():
            self._setup()

    def __repr__(self) -> str:
        if not vars(self):
            return f"<{type(self).__name__}: its model was closed>"
        return f"{type(self).__name__}({self.model!r}, lr={self.lr:g})"

    @property
    def light(self) -> bool:
        """Whether its checkpoints hold only its own tensors."""
        return self.settings.light

    # -- what a subclass defines -------------------------------------------------------------------------------------

    def _setup(self) -> None:
        """Makes what the method needs, and attaches it: self.model.methods.attach(self)."""
        raise NotImplementedError  # abstract

    def _step(self, batch: Any) -> torch.Tensor:
        """One update from one batch, or from the micro-batches of one step."""
        raise NotImplementedError  # abstract

    def _backward(self, loss: torch.Tensor) -> None:
        raise UserError(f"{type(self).__name__} has no backward(loss): give the batch to step(batch) instead")

    def _flush(self) -> None:
        """Applies deferred updates."""

    def _state(self) -> State:
        raise NotImplementedError  # abstract

    def _deferred_state(self) -> State | None:
        return None

    def _load(self, state: Saved) -> None:
        raise NotImplementedError  # abstract

    @classmethod
    def check_shapes(cls, base: Skeleton, own: Any) -> None:
        """UserError where making the method would be refused for the model's shapes; called before weights are read. It
        changes nothing. own: the method's settings."""

    @classmethod
    def outline(cls, base: Any, own: Any) -> None:
        """Does to a module without weights what making the method does to the model: adds what is trained beside it,
        without memory, and freezes what is not trained. base: its module, layout and blocks; own: the method's
        settings. UserError where making it would be refused for the model's shapes."""

    # -- steps -------------------------------------------------------------------------------------------------------

    @leaves_no_frames
    def step(self, batch: Batch | Sequence[Batch]) -> torch.Tensor:
        """One update from one batch, or from the micro-batches of one step. Returns the loss, a device scalar."""
        with self._stepping():
            return self._step(batch)

    @leaves_no_frames
    def backward(self, loss: torch.Tensor) -> None:
        """Instead of loss.backward(), where a method has it."""
        with self._stepping():
            self._backward(loss)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self.lr = checked_rate(self.lr)
        if self._torch_optimizer is not None:
            self._torch_optimizer.sync()
        methods = self.model.methods
        if self.model.device_weights.replacement is not None:
            raise UserError("closure: steps do not nest: a method steps inside of the closure of another step")
        self.model.check_idle()
        with computing(), with_gradients():
            methods.take_changes()
            self._check_parameters()
            methods.step_begins(self)
            try:
                yield
                methods.step_done()
            except BaseException as error:
                for param in self._parameters():
                    param.grad = None  # the next step would refuse them
                if isinstance(error, WorkerFailed) or (lacks := out_of_memory(error)) is None:
                    raise
                sizes = "" if self.model.placed is None else self.model.placed.compared
                raise UserError(f"{lacks}\n  {sizes}".rstrip()) from error
            finally:
                methods.step_ends()

    def _parameters(self) -> Iterator[nn.Parameter]:
        beside = () if self.addon is None else self.addon.params.values()
        return chain((tensor.param for tensor in self.model.layout.tensors), beside)

    def _check_parameters(self) -> None:
        """UserError for what a caller's loop has done to parameters that a step cannot follow.

        What is trained is decided when a method is made: optimizer state, spans of weights and hooks exist for these
        parameters only. One that is frozen later gets no gradient, and stays as it is; a method without gradients
        (`may_freeze` is False) would go on to change it. One that requires gradients only later would never change.
        Gradients that loss.backward() of the caller's has left would be added to those of the step."""
        tensors = self.model.layout.tensors
        before, now = self.model.methods.trained.get(self), [t.param.requires_grad for t in tensors]
        if before is not None and before != now:
            changed = [t for t, a, b in zip(tensors, before, now, strict=True) if a is not b]
            unfrozen = [t.name for t in changed if t.param.requires_grad]
            frozen = [t.name for t in changed if not t.param.requires_grad]
            if unfrozen:
                raise UserError(
                    f"requires_grad: {listed(unfrozen)} did not require gradients when {self.name} was made, and "
                    "would not be trained. Make the method while everything requires gradients that will be trained, "
                    "and freeze afterwards what begins later"
                )
            if frozen and not self.may_freeze:
                raise UserError(
                    f"requires_grad: {listed(frozen)} was frozen after {self.name} was made, which would still "
                    "change it: make the method again, after flush(), and give it the state (load_state_dict)"
                )
            if self.addon is None and not any(now):
                raise UserError(
                    f"requires_grad: all parameters were frozen after {self.name} was made, and a step would train "
                    "nothing: call requires_grad_(True) on those that are to be trained"
                )
        if self.may_freeze and any(param.grad is not None for param in self._parameters()):
            left = [tensor.name for tensor in tensors if tensor.param.grad is not None]
            beside = {} if self.addon is None else self.addon.params
            left += [name for name, param in beside.items() if param.grad is not None]
            raise UserError(
                f"gradients: loss.backward() has left some in {listed(left)}, and they would be added to those of this "
                f"step; call model.module.zero_grad() first. {self.name} updates in step(batch), or in backward(loss) "
                "where it has one, and keeps no gradients"
            )

    def close(self) -> None:
        """Ends what works for it on the host, after the updates that are under way; so does deleting it. Flush
        first."""
        if self._end is not None:
            self._end()

    @leaves_no_frames
    def flush(self) -> None:
        """Applies deferred updates: afterwards the weights at home are those after the last step, and the caller may
        change them. Mixed if that step was applied in part."""
        with computing(), with_gradients():
            self.model.methods.take_changes()
            self._flush()
            self.model.methods.check_whole()
            self.model.methods.flushed()

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Everything except the weights that a resumed run needs, whose it is included. Flushes."""
        self.model.methods.check_whole()
        return self._named(self._state())

    def deferred_state(self) -> State | None:
        """The state without a flush, if an update is deferred to the next step; None if nothing is deferred."""
        state = self._deferred_state()
        return None if state is None else self._named(state)

    def _named(self, state: State) -> State:
        return {METHOD: self.name, TENSORS: self.model.layout.fingerprint} | state

    @leaves_no_frames
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """UserError for the state of another method or model, and for what is no state at all."""
        try:
            whole = state if isinstance(state, MethodState) else MethodState(state)
            if state[METHOD] != self.name:
                raise UserError(
                    f"{self.name}: this is the state of another method, {state[METHOD]}; make that method, and load it"
                )
            if state[TENSORS] != self.model.layout.fingerprint:
                raise UserError(
                    f"{self.name}: this is the state of another model: names or shapes of parameters differ"
                )
            if (seed := state.get("seed", self.settings.seed)) != self.settings.seed:
                raise UserError(f"seed: the checkpoint was made with {seed}, this run has {self.settings.seed}")
            with with_gradients():
                self._load(whole.without(METHOD, TENSORS))
        except UserError:
            raise
        except (RuntimeError, KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, RuntimeError) and "must match the size" not in str(error):  # torch's of other shapes
                raise
            raise UserError(
                f"{self.name}: this is not a state that {type(self).__name__}.state_dict returned, or it is of another "
                "model or other settings and does not fit: make the method as it was made when the state was saved "
                f"({type(error).__name__}: {error})"
            ) from error

    # -- for the training loop ---------------------------------------------------------------------------------------

    def follow(self, factor: Callable[[float], float]) -> None:
        """Called before a step, for rates beside `lr` with a warm-up of their own: factor(warmup_ratio) is the share of
        the peak rate that the schedule has at this step."""

    def metrics(self) -> dict[str, torch.Tensor | float]:
        """Numbers of the last step for the log; device scalars are not read here."""
        return {}

    def describe(self) -> list[str]:
        """Lines of the start block: the decisions made."""
        return []

    @property
    def torch_optimizer(self) -> TorchOptimizer:
        """The method as an optimizer for torch's schedulers; the rate that they set is that of the next step."""
        if self._torch_optimizer is None:
            self._torch_optimizer = TorchOptimizer(self)
        return self._torch_optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group: the trained parameters, and their rate."""
        return self.torch_optimizer.param_groups

    # -- for the model that it is attached to (model/attached.py) -----------------------------------------------------

    @property
    def deferred(self) -> Callable[[], None] | None:
        """A function that applies updates that the weights at home lack; None if updates are never deferred."""
        return None

    @property
    def is_settled(self) -> bool:
        """Whether the weights at home hold all updates made so far, so that a caller may change them."""
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the last step was applied to all weights, or to none. Waits until that is known."""
        return True

    @property
    def addon(self) -> Addon | None:
        """Trained weights beside the model's own; None if there are none."""
        return None

    # -- for checkpoints that are written while training goes on, and for the journal ---------------------------------

    def owes(self, unit: Unit) -> bool:
        """Whether the unit's home lacks an update that its next visit will apply."""
        return False

    def call_before_update(self, callback: Callable[[], None]) -> None:
        """Registers a callback that runs before an update changes weights (traits: announces = "step")."""
        raise NotImplementedError  # abstract: only if the traits say so

    def journal_update(self) -> torch.Tensor | None:
        """The numbers from which the last step's update can be recomputed, on the device."""
        return None

    # -- for methods that look at rows before they train on them ----------------------------------------------------

    @property
    def rows_ahead(self) -> tuple[int, int] | None:
        """The number of coming rows that the method asks for before the next step, and the most tokens of a batch of
        them; None: it asks for none."""
        return None

    def look_ahead(self, batches: Sequence[Batch]) -> None:
        """Receives batches of coming rows, before a step."""
        raise NotImplementedError  # abstract: only if rows_ahead is not always None
