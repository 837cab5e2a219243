"""The row of a method: everything that other code knows about it, without importing it.

Each folder of methods/ has a file traits.py with its settings (a dataclass) and one `Traits` per method; the rows are
collected in the table of methods/__init__.py. Config, plan, training, checkpoint, demo, bench and docs read rows; no
other file knows a method by its name (tests/test_layers.py). So a new kind of difference between methods is a new field
here, with a default that is right for most of them, and no `if` elsewhere.

A row holds facts (rates, formats, how a step sweeps the model), small functions of the method's own settings, and
the names of classes and formulas as "module:name", which are imported when they are first needed: rows are read by the
command line before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol

from keyhole.methods.workload import DeviceBytes, Room, Workload

if TYPE_CHECKING:
    from keyhole.machine.rates import Rates
    from keyhole.methods.base import Method
    from keyhole.methods.work import StepWork
    from keyhole.model.structure.layout import Layout

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


class RunSettings(Protocol):
    """The other settings of a run that a method may read. max_steps: None if the data decide, or if it is unknown."""

    @property
    def dtype(self) -> str | None: ...
    @property
    def wire(self) -> str | None: ...
    @property
    def placement(self) -> str: ...
    @property
    def learning_rate(self) -> float | str | None: ...
    @property
    def max_grad_norm(self) -> float | None: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def max_steps(self) -> int | None: ...


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
    forwards: Callable[[Any], float] | None = None
    """The cost of a step in forward passes over its rows, a function of own settings; None for methods with gradients,
    whose cost is no number of forward passes."""
    forwards_ahead: Callable[[Any, int, int], tuple[float, int]] = lambda settings, rows, all_rows: (0.0, 1)
    """(passes, steps): the forward passes, counted as in `forwards`, that come before each period of so many steps; a
    function of own settings, the rows of a step and the rows of the data."""
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
    """For messages: own settings with which the method supports frozen formats, if its defaults do not."""
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
    idle: Callable[[Any, RunSettings], Iterator[Fault]] = lambda settings, run: iter(())
    """Own settings that others make meaningless: yields each that differs from its default, and why."""
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
    """The advice of methods that keep block inputs on the device by default: keep them in host memory."""
    return Advice() if own.activations == "host" else Advice(change=("activations=host",))


def imported(where: str) -> Any:
    """The object behind "module:name"."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)
