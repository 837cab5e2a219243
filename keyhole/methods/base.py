"""What a method is: the class that the training loop calls, and the row of traits that everybody else reads.

A method lives in one folder:

    traits.py    its settings, and its row: rates, formats, bytes, what may change on resume. Imports no torch.
    method.py    a subclass of Method (further files as its ideas need them)
    memory.py    the bytes that it needs, as functions of shapes

It has one line in the table of methods/__init__.py. Config, plan, training, checkpoint, demo, bench and docs read the
row; no other file knows a method by its name (tests/test_layers.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol

from keyhole.errors import UserError

if TYPE_CHECKING:
    import torch

    from keyhole.machine.rates import Rates
    from keyhole.methods.torch_optimizer import TorchOptimizer
    from keyhole.methods.work import StepWork
    from keyhole.model.attached import Addon
    from keyhole.model.batch import Batch
    from keyhole.model.forward.low_rank import Factors
    from keyhole.model.model import Model
    from keyhole.model.structure.layout import Layout, Unit
    from keyhole.model.weights.format import Wire

State = dict[str, Any]
AUTO_RATE = "auto"  # a learning rate that the method finds by itself
FROZEN_WIRES = ("int8", "int4", "nf4")  # formats whose weights are never changed (ops/lowbit.py)
Fault = tuple[str, str]  # a key of the config, and what is wrong with its value


@dataclass(frozen=True)
class Demo:
    """How `keyhole demo` trains with a method on the embedded model: linear decay to 0, no warm-up."""

    steps: int = 100
    lr: float = 1e-3
    batch_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shared:
    """The settings of a run that every method takes."""

    learning_rate: float | str  # "auto" only where the row says that the method finds one
    weight_decay: float = 0.0
    weight_decay_on: str = "matrices"
    max_grad_norm: float | None = None
    model_dropout: bool = True
    seed: int = 0


class RunSettings(Protocol):
    """What a method may ask of the other settings of a run. max_steps: None where the data decide, or nobody knows."""

    dtype: str | None
    wire: str | None
    placement: str
    max_grad_norm: float | None
    weight_decay: float
    max_steps: int | None


@dataclass(frozen=True)
class Workload:
    """What will run, as far as memory is concerned. settings: the method's own (None: its defaults)."""

    method: str = "zo"
    tokens: int = 2048  # in one forward pass: batch_size x length
    passes: int = 2  # forward passes that advance together: 2 x directions x micro-batches
    settings: Any = None
    clips: bool = False  # max_grad_norm is set
    searches: bool = False  # a learning rate, in the first steps
    length: int | None = None  # of a row, for the time of attention; None: as if a batch were one row
    experts: float = 1.0  # the share of a stack of experts that a token meets, for the time of products
    ranks: int = 1  # processes that train together, and how many of them share this machine's memory
    local_ranks: int = 1
    steps: int | None = None  # of the whole run, for what grows with it; None: not known


@dataclass(frozen=True)
class Room:
    """What a device offers: formats of the weights, bytes that the libraries reserve per thread, and the most bytes
    that a method may fill with state (None: no limit is known), which may be a `gpu_memory` that somebody set."""

    formats: Wire
    workspace_bytes: int
    limit_bytes: int | None = None
    is_budget: bool = False


class DeviceBytes(Protocol):
    """The parts of a planned device peak: a dataclass with a field per part."""

    @property
    def total(self) -> int: ...
    @property
    def during_a_step(self) -> int: ...


@dataclass(frozen=True)
class Advice:
    """What would make a step need less memory: settings to lower, and settings to set."""

    lower: tuple[str, ...] = ()
    change: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The row of a method. Names of functions and classes are "module:name", imported when they are first needed."""

    name: str
    cls: str
    """The subclass of Method."""
    settings: type
    """The dataclass behind the section of the config that has the method's name."""
    learning_rate: float
    """The rate where none is given."""
    sane_rates: tuple[float, float]
    """The range of rates that has been seen to work on models of 0.1 to 13 billion parameters."""
    usual_rates: Callable[[Any], tuple[float, tuple[float, float]]] | None = None
    """(learning_rate, sane_rates) where own settings change them."""
    forwards: Callable[[Any], int] | None = None
    """What a step costs in forward passes over its rows; None: it has gradients, and forward passes are no measure."""
    search_steps: int = 0
    """Steps of a search for a rate."""
    search_passes: int = 0
    """Forward passes per micro-batch of a step that searches a rate; 0: `learning_rate: auto` is not understood."""
    fill: Callable[[Any], Any] = lambda settings: settings
    """Own settings with their blanks filled in, where a default depends on another setting."""
    sweep: Literal["forward", "reverse", "torch"]
    """How a step visits the model: forward passes in lockstep; block by block forward and in reverse; torch's autograd
    over a resident model."""
    device_bytes: str = "keyhole.methods.memory:forward_bytes"
    """(layout, streamed, work, room) -> DeviceBytes."""
    host_check: str | None = None
    """(layout, streamed, element_bytes, cut=, ranks=, of=): refuses state that host memory cannot hold; cut: of units
    that ranks share out, what one keeps; ranks: those on this machine, of how many. None: it keeps none there."""
    step_work: str = "keyhole.methods.work:forward_work"
    """(layout, streamed, work, room, rates) -> StepWork: what a step asks of a machine (methods/work.py)."""
    steps: float = 1.0
    """Steps that it takes to learn what AdamW learns in one: a rule of thumb, by which the planner compares methods."""
    wires: tuple[str, ...] = ()
    """Formats that weights may have at rest and on the link, beside the dtype of compute."""
    frozen_wires: Callable[[Any], tuple[str, ...]] = lambda settings: ()
    """Further formats, whose weights cannot be changed: those that the method takes with these settings."""
    frozen_by: str = ""
    """Own settings with which it takes them, where its defaults do not; for messages."""
    underflow_safe: bool = False
    """float16 is safe: the method has no gradients, or scales its loss."""
    journaled: bool = False
    """Each step is a record of a few numbers from which its update can be made again."""
    announces: Literal["pages", "step", "never"] = "never"
    """How changes of weights are announced to a checkpoint that is being written: page by page through the engine, all
    at once before an update (Method.call_before_update), or not at all."""
    ranks: Literal["replicas", "shards"] | None = None
    """How several ranks (keyhole/ranks) train together. Each takes its part of the micro-batches; replicas: has all
    weights, and makes the same update; shards: keeps and updates a part of the weights. None: not at all."""
    exchanged: Callable[[float], float] = lambda width: 1.0
    """Bytes of gradients and updates that ranks exchange per step, per byte of 16-bit weights, in a model of this
    width; gathers of weights do not count."""
    through_host: tuple[float, float] = (0.0, 0.0)
    """Of an optimizer on the host: bytes over the link per byte of 16-bit weights, where these are resident, and bytes
    through host memory per parameter, per step."""
    keeps_base: bool = False
    """The model's own weights never change: a run goes on from the original model and the method's state."""
    light: Callable[[Any], bool] = lambda settings: False
    """Whether checkpoints hold the method's tensors alone, with everything that has changed: a run goes on from the
    original model and these."""
    may_change: tuple[str, ...] = ()
    """Own settings that may change when a run goes on."""
    passes: Callable[[Any], int] = lambda settings: 1
    """Forward passes per micro-batch."""
    whole_blocks: Callable[[Any], bool] = lambda settings: False
    """Whether blocks must not be cut into smaller units."""
    by_expert: Callable[[Any], bool] = lambda settings: False
    """Whether large stacks of experts may be cut into experts, which come and go one by one."""
    advice: Callable[[Any], Advice] = lambda settings: Advice()
    """What would lower the memory of a step."""
    faults: Callable[[Any, RunSettings], Iterator[Fault]] = lambda settings, run: iter(())
    """What own settings demand of each other and of the run's: every contradiction."""
    demo: Demo = Demo()

    @property
    def section(self) -> str:
        """The section of the config with the method's settings."""
        return self.name.replace("-", "_")

    def rates(self, own: Any) -> tuple[float, tuple[float, float]]:
        """(the rate where none is given, the range that has been seen to work) with these own settings."""
        return (self.learning_rate, self.sane_rates) if self.usual_rates is None else self.usual_rates(own)

    def all_wires(self, own: Any) -> tuple[str, ...]:
        """Every format that the method takes with these settings."""
        return (*self.wires, *self.frozen_wires(own))

    def beside(self, wire: str, own: Any) -> str:
        """How this method learns beside weights in a format that cannot be changed, in words; "": not at all."""
        if wire in self.frozen_wires(own):
            return self.name
        return f"{self.name} with {self.frozen_by}" if self.frozen_by and wire in FROZEN_WIRES else ""

    def from_original(self, own: Any) -> bool:
        """Whether a run with these own settings goes on from the original model, and not from a checkpoint's."""
        return self.keeps_base or self.light(own)

    @property
    def streams(self) -> bool:
        """Whether weights may live in host memory."""
        return self.sweep != "torch"

    def load(self) -> type[Method]:
        """The class itself; imports torch."""
        found: type[Method] = imported(self.cls)
        return found

    def planned_bytes(self, layout: Layout, streamed: set[int], work: Workload, room: Room) -> DeviceBytes:
        """The device peak of a step when these units are streamed."""
        found: DeviceBytes = imported(self.device_bytes)(layout, streamed, work, room)
        return found

    def planned_work(self, layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
        """What a step asks of a machine when these units are streamed."""
        found: StepWork = imported(self.step_work)(layout, streamed, work, room, rates)
        return found


def host_activations(own: Any) -> Advice:
    """Of methods that keep block inputs on the device unless told otherwise."""
    return Advice() if own.activations == "host" else Advice(change=("activations=host",))


def imported(where: str) -> Any:
    """The object behind "module:name"."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


class Method:
    """An update rule on a model. A method must define __init__, step, state_dict and load_state_dict; the rest has
    defaults.

    `lr` may be changed between steps.
    """

    name: str
    model: Model
    lr: float
    keeps_base: bool = False
    """Whether this method, with its settings, never changes the weights of blocks, so that they may be frozen."""
    light: bool = False
    """Whether its checkpoints hold its own tensors alone (Traits.light)."""

    def __init_subclass__(cls) -> None:
        """A step computes in the model's dtype, whatever autocast its caller is in (ops/autocast.py), at the rate that
        a scheduler has set."""
        for name in {"step", "backward"} & vars(cls).keys():
            setattr(cls, name, _without_autocast(vars(cls)[name]))

    def __new__(cls, *args: Any, **options: Any) -> Method:
        """Refuses what is no model before anything is made of it."""
        from keyhole.model.model import Model

        model = args[0] if args else options.get("model")
        if not isinstance(model, Model):
            found = "nothing" if model is None else f"a {type(model).__name__}"
            raise UserError(
                f"{cls.name}: found {found}, expected the model that keyhole.load returns: "
                f'keyhole.{cls.__name__}(keyhole.load("path-or-hub-id"), lr=...)'
            )
        return super().__new__(cls)

    def __init__(self, model: Model, lr: float | str, **settings: Any) -> None:
        raise NotImplementedError  # abstract

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, lr={self.lr:g})"

    @classmethod
    def make(cls, model: Model, shared: Shared, own: Any) -> Method:
        """The method as a config asks for it: the settings that all methods share, and its own section."""
        rules = {key: value for key, value in vars(shared).items() if key != "learning_rate"}
        return cls(model, shared.learning_rate, **rules, **vars(own))

    def step(self, batch: Batch | list[Batch]) -> torch.Tensor:
        """One update from one batch, or from the micro-batches of one step. Returns the loss, a device scalar."""
        raise NotImplementedError  # abstract

    def backward(self, loss: torch.Tensor) -> None:
        """Instead of loss.backward(), where a method has it."""
        raise UserError(f"{type(self).__name__} has no backward(loss): give the batch to step(batch) instead")

    def follow(self, factor: Callable[[float], float]) -> None:
        """Before a step, for rates beside `lr` with a warm-up of their own: factor(warmup_ratio) is the share of the
        peak rate that the schedule has at this step."""

    @property
    def rate(self) -> float:
        """The learning rate that a step would use now."""
        return self.lr

    def news(self) -> list[str]:
        """What was decided in the last step, for the user; each line is told once."""
        return []

    def state_dict(self) -> State:
        """All that a later process needs to go on, beside the weights. Flushes."""
        raise NotImplementedError  # abstract

    def load_state_dict(self, state: State) -> None:
        raise NotImplementedError  # abstract

    def flush(self) -> None:
        """Applies what is deferred: afterwards the weights at home are those after the last step."""

    def metrics(self) -> dict[str, torch.Tensor | float]:
        """Numbers of the last step for the log; scalars on the device are not read."""
        return {}

    def describe(self) -> list[str]:
        """Lines of the start block: what was decided."""
        return []

    # -- for torch's schedulers, and loops that want an optimizer ----------------------------------------------------

    @property
    def torch_optimizer(self) -> TorchOptimizer:
        """The method as torch's schedulers see it; the rate that they set is that of the next step."""
        if "_torch_optimizer" not in vars(self):
            from keyhole.methods.torch_optimizer import TorchOptimizer  # here: rows are read without torch

            self._torch_optimizer = TorchOptimizer(self)
        return self._torch_optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group: the trained parameters, and their rate."""
        return self.torch_optimizer.param_groups

    # -- for the model that it is attached to (model/attached.py) -----------------------------------------------------

    @property
    def deferred(self) -> Callable[[], None] | None:
        """Applies updates that the weights at home lack; None where updates are never deferred."""
        return None

    @property
    def addon(self) -> Addon | None:
        """Trained weights beside the model's own; None where there are none."""
        return None

    # -- for checkpoints that are written while training goes on (checkpoint/snapshot/) ------------------------------

    def owes(self, unit: Unit) -> bool:
        """Whether the unit's home lacks an update that its next visit will bring."""
        return False

    def deferred_state(self) -> State | None:
        """The state without a flush, where an update is deferred to the next step; None where nothing is."""
        return None

    def call_before_update(self, callback: Callable[[], None]) -> None:
        """Has the callback called before an update changes weights (traits: announces = "step")."""
        raise NotImplementedError  # abstract: only where the row says so

    def learned_beside(self, state: Mapping[str, Any]) -> Factors | None:
        """Of a state that was saved: what a model's files lack, and what has to be added to them before others can use
        them; None where nothing is."""
        return None

    # -- for the journal (checkpoint/journal/), where the row says so ------------------------------------------------

    def journal_update(self) -> torch.Tensor | None:
        """The numbers from which the last step's update can be made again, on the device."""
        return None


def _without_autocast(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def exact(*args: Any, **options: Any) -> Any:
        from keyhole.ops.autocast import without_autocast  # here: rows are read without torch

        shell = vars(args[0]).get("_torch_optimizer") if args else None
        if shell is not None:
            shell.sync()
        with without_autocast():
            return step(*args, **options)

    return exact


def checked_rate(lr: Any) -> float:
    """The learning rate, if it is one: for callers that have no config."""
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not math.isfinite(lr) or lr < 0:
        raise UserError(f"lr: {lr!r} is no learning rate; a number of at least 0 is needed")
    return float(lr)
