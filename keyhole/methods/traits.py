"""The row of a method: everything that other code knows about it, without importing it.

Each folder of methods/ has a file traits.py with its settings (settings.py) and one `Traits` per method; the rows are
collected in the table of methods/__init__.py. Config, plan, training, checkpoint, bench and docs read rows; no other
file knows a method by its name (tests/test_layers.py). What follows from a method's settings is a property of these;
its formulas of bytes and seconds are its `Formulas` (workload.py); a row holds the facts. Class and formulas are named
as "module:name" and imported when they are first needed: rows are read by the command line before torch is.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from keyhole.methods.settings import FROZEN_WIRES, MethodSettings, Rates
from keyhole.methods.workload import DeviceBytes, Formulas, Room, StepWork, Workload

if TYPE_CHECKING:
    from keyhole.machine.rates import Rates as MachineRates
    from keyhole.model.structure.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The row of a method."""

    name: str
    # The subclass of Method, as "module:name".
    cls: str
    # The dataclass of the settings; the config section of the method's name has those that are no settings of the run.
    settings: type[MethodSettings]
    # The formulas of bytes and work, as "module:name".
    formulas: str = "keyhole.methods.work:FORMULAS"
    # The default learning rate.
    learning_rate: float
    # The range of rates that worked on models of 0.1 to 13 billion parameters.
    sane_rates: tuple[float, float]
    # How a step visits the model: forward passes in lockstep; forward and backward pass block by block; or torch's
    # autograd over a resident model.
    sweep: Literal["forward", "reverse", "torch"]
    # Steps needed to learn what AdamW learns in one, where that is many times as many: a guess by which the planner
    # compares methods, and its evidence.
    steps: float = 1.0
    evidence: str = ""
    # Formats that weights may have at home and on the link, beside the dtype of compute.
    wires: tuple[str, ...] = ()
    # For messages: own settings with which the method supports frozen formats, if its defaults do not.
    frozen_by: str = ""
    # float16 is safe: the method has no gradients, or scales its loss.
    underflow_safe: bool = False
    # Each step is a record of a few numbers from which its update can be recomputed.
    journaled: bool = False
    # How a checkpoint that is being written learns of changes of weights: page by page through the engine, once before
    # an update (Method.call_before_update), or not at all.
    announces: Literal["pages", "step", "never"] = "never"
    # How several ranks (keyhole/ranks) train together; each takes its share of the micro-batches. replicas: each rank
    # has all weights and makes the same update; shards: each keeps and updates a part. None: not supported.
    ranks: Literal["replicas", "shards"] | None = None
    # The model's own weights never change: a run resumes from the original model and the method's state.
    keeps_base: bool = False
    # Own settings that may change on resume.
    may_change: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """The section of the config with the method's settings."""
        return self.name.replace("-", "_")

    def rates(self, own: MethodSettings) -> Rates:
        """(the default rate, the range of rates that worked) with these own settings."""
        return own.rates((self.learning_rate, self.sane_rates))

    def all_wires(self, own: MethodSettings) -> tuple[str, ...]:
        """Every format that the method supports with these settings."""
        return (*self.wires, *own.frozen_wires)

    def beside(self, wire: str, own: MethodSettings) -> str:
        """How this method trains beside weights in a frozen format, in words; "": it cannot."""
        if wire in own.frozen_wires:
            return self.name
        return f"{self.name} with {self.frozen_by}" if self.frozen_by and wire in FROZEN_WIRES else ""

    def from_original(self, own: MethodSettings) -> bool:
        """Whether a run with these own settings resumes from the original model, not from a checkpoint's."""
        return self.keeps_base or own.light

    @property
    def streams(self) -> bool:
        """Whether weights may live in host memory."""
        return self.sweep != "torch"

    def load(self) -> Any:
        """The class itself, a type[Method] (base.py, which knows rows); imports torch."""
        return imported(self.cls)

    @property
    def costs(self) -> Formulas:
        """The formulas themselves; imports torch."""
        found: Formulas = imported(self.formulas)
        return found

    def planned_bytes(self, layout: Layout, streamed: set[int], work: Workload, room: Room) -> DeviceBytes:
        """The device peak of a step if these units are streamed."""
        return self.costs.device_bytes(layout, streamed, work, room)

    def planned_work(
        self, layout: Layout, streamed: set[int], work: Workload, room: Room, rates: MachineRates
    ) -> StepWork:
        """The FLOPs, bytes and launches of a step if these units are streamed."""
        return self.costs.step_work(layout, streamed, work, room, rates)


def imported(where: str) -> Any:
    """The object behind "module:name"."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)
