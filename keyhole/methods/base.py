"""What a method is: the class that the training loop calls, and the row of traits that all other code reads.

A method lives in one folder:

    traits.py    its settings, and its row: rates, formats, bytes, what may change on resume. Imports no torch.
    method.py    a subclass of Method (more files as needed)
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
AUTO_RATE = "auto"  # the method searches a learning rate
FROZEN_WIRES = ("int8", "int4", "nf4")  # formats whose weights are never changed (ops/lowbit.py)
Fault = tuple[str, str]  # a key of the config, and the error in its value


@dataclass(frozen=True)
class Demo:
    """How `keyhole demo` trains with a method on the embedded model: linear decay to 0, no warm-up."""

    steps: int = 100
    lr: float = 1e-3
    batch_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shared:
    """The settings of a run that all methods share."""

    learning_rate: float | str  # "auto" only if the method can search a rate (Traits)
    weight_decay: float = 0.0
    weight_decay_on: str = "matrices"
    max_grad_norm: float | None = None
    model_dropout: bool = True
    seed: int = 0


class RunSettings(Protocol):
    """The other settings of a run that a method may read. max_steps: None if the data decide, or if it is unknown."""

    dtype: str | None
    wire: str | None
    placement: str
    max_grad_norm: float | None
    weight_decay: float
    max_steps: int | None


FORWARD_ONLY = ("eval", "chat", "replay")  # what a Workload may name that is no method: it is planned without updates


@dataclass(frozen=True)
class Workload:
    """What will run, as far as memory and time are concerned. settings: the method's own (None: its defaults)."""

    method: str = "zo"
    tokens: int = 2048  # per forward pass: batch_size x length
    passes: int = 2  # forward passes in lockstep: 2 x directions x micro-batches
    settings: Any = None
    clips: bool = False  # max_grad_norm is set
    searches: bool = False  # the first steps search a learning rate
    length: int | None = None  # of a row, for the time of attention; None: a batch counts as one row
    experts: float = 1.0  # the share of a stack of experts that a token uses, for the time of products
    ranks: int = 1  # processes that train together, and how many of them share this machine's memory
    local_ranks: int = 1
    steps: int | None = None  # of the whole run, for costs that grow with it; None: unknown


@dataclass(frozen=True)
class Room:
    """What a device offers: the formats of the weights, the bytes that libraries reserve per thread, and the most bytes
    that a method may fill with state (None: no known limit), possibly the user's `gpu_memory`."""

    formats: Wire
    workspace_bytes: int
    limit_bytes: int | None = None
    is_budget: bool = False


class DeviceBytes(Protocol):
    """The parts of a planned device peak: a dataclass with one field per part."""

    @property
    def total(self) -> int: ...
    @property
    def during_a_step(self) -> int: ...


@dataclass(frozen=True)
class Advice:
    """How a step could need less memory: settings to lower, and settings to set."""

    lower: tuple[str, ...] = ()
    change: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The row of a method. Names of functions and classes are "module:name", imported when they are first needed."""

    name: str
    cls: str
    """The subclass of Method."""
    settings: type
    """The dataclass of the config section with the method's name."""
    learning_rate: float
    """The default learning rate."""
    sane_rates: tuple[float, float]
    """The range of rates that worked on models of 0.1 to 13 billion parameters."""
    usual_rates: Callable[[Any], tuple[float, tuple[float, float]]] | None = None
    """(learning_rate, sane_rates), if they depend on the method's own settings."""
    forwards: Callable[[Any], int] | None = None
    """The cost of a step in forward passes over its rows; None for methods with gradients, which it cannot measure."""
    search_steps: int = 0
    """Number of steps of a learning-rate search."""
    search_passes: int = 0
    """Forward passes per micro-batch of a step of the rate search; 0: `learning_rate: auto` is not supported."""
    fill: Callable[[Any], Any] = lambda settings: settings
    """Own settings with unset values filled in, if a default depends on another setting."""
    sweep: Literal["forward", "reverse", "torch"]
    """How a step visits the model: forward passes in lockstep; forward and backward pass block by block; or torch's
    autograd over a resident model."""
    device_bytes: str = "keyhole.methods.memory:forward_bytes"
    """(layout, streamed, work, room) -> DeviceBytes."""
    host_check: str | None = None
    """(layout, streamed, element_bytes, cut=, ranks=, of=): refuses state that does not fit into host memory. cut: what
    this rank keeps of sharded units; ranks: those on this machine; of: all ranks. None: no state in host memory."""
    step_work: str = "keyhole.methods.work:forward_work"
    """(layout, streamed, work, room, rates) -> StepWork: the FLOPs, bytes and launches of a step (methods/work.py)."""
    steps: float = 1.0
    """Steps needed to learn what AdamW learns in one: a rule of thumb by which the planner compares methods."""
    wires: tuple[str, ...] = ()
    """Formats that weights may have at home and on the link, beside the dtype of compute."""
    frozen_wires: Callable[[Any], tuple[str, ...]] = lambda settings: ()
    """Further formats, whose weights are frozen, that the method supports with these settings."""
    frozen_by: str = ""
    """Own settings with which it supports them, if its defaults do not; for messages."""
    underflow_safe: bool = False
    """float16 is safe: the method has no gradients, or scales its loss."""
    journaled: bool = False
    """Each step is a record of a few numbers from which its update can be recomputed."""
    announces: Literal["pages", "step", "never"] = "never"
    """How a checkpoint that is being written learns of changes of weights: page by page through the engine, once before
    an update (Method.call_before_update), or not at all."""
    ranks: Literal["replicas", "shards"] | None = None
    """How several ranks (keyhole/ranks) train together; each takes its share of the micro-batches. replicas: each rank
    has all weights and makes the same update; shards: each keeps and updates a part. None: not supported."""
    exchanged: Callable[[float], float] = lambda width: 1.0
    """Bytes of gradients and updates that ranks exchange per step, per byte of 16-bit weights, in a model of this
    width; gathers of weights do not count."""
    through_host: tuple[float, float] = (0.0, 0.0)
    """For an optimizer on the host, per step: bytes over the link per byte of 16-bit weights, if these are resident,
    and bytes through host memory per parameter."""
    keeps_base: bool = False
    """The model's own weights never change: a run resumes from the original model and the method's state."""
    light: Callable[[Any], bool] = lambda settings: False
    """Whether checkpoints hold only the method's tensors, which contain everything that has changed: a run resumes from
    the original model and these tensors."""
    may_change: tuple[str, ...] = ()
    """Own settings that may change on resume."""
    passes: Callable[[Any], int] = lambda settings: 1
    """Forward passes per micro-batch."""
    whole_blocks: Callable[[Any], bool] = lambda settings: False
    """Whether blocks must not be cut into smaller units."""
    by_expert: Callable[[Any], bool] = lambda settings: False
    """Whether large stacks of experts may be cut into experts, which are streamed one by one."""
    advice: Callable[[Any], Advice] = lambda settings: Advice()
    """How the memory of a step could be lowered."""
    faults: Callable[[Any, RunSettings], Iterator[Fault]] = lambda settings, run: iter(())
    """Checks own settings against each other and against those of the run: yields every contradiction."""
    demo: Demo = Demo()

    @property
    def section(self) -> str:
        """The section of the config with the method's settings."""
        return self.name.replace("-", "_")

    def rates(self, own: Any) -> tuple[float, tuple[float, float]]:
        """(the default rate, the range of rates that worked) with these own settings."""
        return (self.learning_rate, self.sane_rates) if self.usual_rates is None else self.usual_rates(own)

    def all_wires(self, own: Any) -> tuple[str, ...]:
        """Every format that the method supports with these settings."""
        return (*self.wires, *self.frozen_wires(own))

    def beside(self, wire: str, own: Any) -> str:
        """How this method trains beside weights in a frozen format, in words; "": it cannot."""
        if wire in self.frozen_wires(own):
            return self.name
        return f"{self.name} with {self.frozen_by}" if self.frozen_by and wire in FROZEN_WIRES else ""

    def from_original(self, own: Any) -> bool:
        """Whether a run with these own settings resumes from the original model, not from a checkpoint's."""
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
        """The device peak of a step if these units are streamed."""
        found: DeviceBytes = imported(self.device_bytes)(layout, streamed, work, room)
        return found

    def planned_work(self, layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
        """The FLOPs, bytes and launches of a step if these units are streamed."""
        found: StepWork = imported(self.step_work)(layout, streamed, work, room, rates)
        return found


def host_activations(own: Any) -> Advice:
    """For methods that keep block inputs on the device by default."""
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
    """Whether its checkpoints hold only its own tensors (Traits.light)."""

    def __init_subclass__(cls) -> None:
        """Wraps `step` so that it computes in the model's dtype, even under the caller's autocast (ops/autocast.py),
        and uses the rate that a scheduler has set."""
        for name in {"step", "backward"} & vars(cls).keys():
            setattr(cls, name, _without_autocast(vars(cls)[name]))

    def __new__(cls, *args: Any, **options: Any) -> Method:
        """Refuses an argument that is not a model, and shared settings outside of their bounds."""
        from keyhole.model.model import Model

        model = args[0] if args else options.get("model")
        if not isinstance(model, Model):
            found = "nothing" if model is None else f"a {type(model).__name__}"
            raise UserError(
                f"{cls.name}: found {found}, expected the model that keyhole.load returns: "
                f'keyhole.{cls.__name__}(keyhole.load("path-or-hub-id"), lr=...)'
            )
        _check_shared(options)
        return super().__new__(cls)

    def __init__(self, model: Model, lr: float | str, **settings: Any) -> None:
        raise NotImplementedError  # abstract

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, lr={self.lr:g})"

    @classmethod
    def make(cls, model: Model, shared: Shared, own: Any) -> Method:
        """The method as configured: the settings that all methods share, and its own section."""
        rules = {key: value for key, value in vars(shared).items() if key != "learning_rate"}
        return cls(model, shared.learning_rate, **rules, **vars(own))

    def step(self, batch: Batch | list[Batch]) -> torch.Tensor:
        """One update from one batch, or from the micro-batches of one step. Returns the loss, a device scalar."""
        raise NotImplementedError  # abstract

    def backward(self, loss: torch.Tensor) -> None:
        """Instead of loss.backward(), where a method has it."""
        raise UserError(f"{type(self).__name__} has no backward(loss): give the batch to step(batch) instead")

    def follow(self, factor: Callable[[float], float]) -> None:
        """Called before a step, for rates beside `lr` with a warm-up of their own: factor(warmup_ratio) is the share of
        the peak rate that the schedule has at this step."""

    @property
    def rate(self) -> float:
        """The learning rate that the next step will use."""
        return self.lr

    def news(self) -> list[str]:
        """Decisions of the last step, for the user; each line is returned once."""
        return []

    def state_dict(self) -> State:
        """Everything except the weights that a resumed run needs. Flushes."""
        raise NotImplementedError  # abstract

    def load_state_dict(self, state: State) -> None:
        raise NotImplementedError  # abstract

    def flush(self) -> None:
        """Applies deferred updates: afterwards the weights at home are those after the last step."""

    def metrics(self) -> dict[str, torch.Tensor | float]:
        """Numbers of the last step for the log; device scalars are not read here."""
        return {}

    def describe(self) -> list[str]:
        """Lines of the start block: the decisions made."""
        return []

    # -- for torch's schedulers, and loops that need an optimizer ---------------------------------------------------

    @property
    def torch_optimizer(self) -> TorchOptimizer:
        """The method as an optimizer for torch's schedulers; the rate that they set is that of the next step."""
        if "_torch_optimizer" not in vars(self):
            from keyhole.methods.torch_optimizer import TorchOptimizer  # here, so that rows can be read without torch

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
    def addon(self) -> Addon | None:
        """Trained weights beside the model's own; None if there are none."""
        return None

    # -- for checkpoints that are written while training goes on (checkpoint/snapshot/) ------------------------------

    def owes(self, unit: Unit) -> bool:
        """Whether the unit's home lacks an update that its next visit will apply."""
        return False

    def deferred_state(self) -> State | None:
        """The state without a flush, if an update is deferred to the next step; None if nothing is deferred."""
        return None

    def call_before_update(self, callback: Callable[[], None]) -> None:
        """Registers a callback that runs before an update changes weights (traits: announces = "step")."""
        raise NotImplementedError  # abstract: only if the traits say so

    def learned_beside(self, state: Mapping[str, Any]) -> Factors | None:
        """From a saved state: the factors that must be merged into a model's files before other programs can use them;
        None if there are none."""
        return None

    # -- for the journal (checkpoint/journal/), if the traits say so -------------------------------------------------

    def journal_update(self) -> torch.Tensor | None:
        """The numbers from which the last step's update can be recomputed, on the device."""
        return None


def _without_autocast(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def exact(*args: Any, **options: Any) -> Any:
        from keyhole.ops.autocast import without_autocast  # here, so that rows can be read without torch

        shell = vars(args[0]).get("_torch_optimizer") if args else None
        if shell is not None:
            shell.sync()
        if args and args[0].model.lens is not None:
            raise UserError("closure: steps do not nest: a method steps inside of the closure of another step")
        if args:
            checked_rate(args[0].rate if isinstance(args[0].rate, int | float) else 0.0)
        with without_autocast():
            found = step(*args, **options)
        if args:
            args[0].model.weights_changed()
        return found

    return exact


def _check_shared(options: Mapping[str, Any]) -> None:
    """Refuses shared settings with which a step would move the weights in the wrong direction."""
    for key, low, needs in (("weight_decay", 0.0, "at least 0"), ("max_grad_norm", math.ulp(0.0), "above 0, or None")):
        value = options.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and value >= low):
            raise UserError(f"{key}: {value!r} is not possible; a number {needs} is needed")


def checked_rate(lr: Any) -> float:
    """Checks a learning rate, for callers that have no config."""
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not math.isfinite(lr) or lr < 0:
        raise UserError(f"lr: {lr!r} is no learning rate; a number of at least 0 is needed")
    return float(lr)
