"""What the formulas of bytes and FLOPs are asked, and what they answer: a workload in a room.

`keyhole plan`, `keyhole.load` and the training loop describe the step that will run (`Workload`: method, tokens,
passes) and the device that it will run on (`Room`). The formulas of a method (`Formulas`, in memory.py of its folder)
are functions of these two, of the layout of the model and of the set of streamed units, so a placement can be chosen
and a peak predicted before any weight is read. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from keyhole.machine.rates import Rates
    from keyhole.methods.settings import MethodSettings
    from keyhole.model.structure.layout import Layout
    from keyhole.model.weights.format import Wire


FORWARD_ONLY = ("eval", "chat", "replay")  # what a Workload may name that is no method: it is planned without updates


@dataclass(frozen=True)
class Workload:
    """What will run, as far as memory and time are concerned. settings: the method's own (None: its defaults)."""

    method: str = "zo"
    tokens: int = 2048  # per forward pass: batch_size x length
    passes: int = 2  # forward passes in lockstep: 2 x directions x micro-batches
    settings: MethodSettings | None = None
    clips: bool = False  # max_grad_norm is set
    length: int | None = None  # of a row, for the time of attention; None: a batch counts as one row
    experts: float = 1.0  # the share of a stack of experts that a token uses, for the time of products
    ranks: int = 1  # processes that train together, and how many of them share this machine's memory
    local_ranks: int = 1
    steps: int | None = None  # of the whole run, for costs that grow with it; None: unknown
    chooses: bool = False  # loss: candidates
    rows: int | None = None  # of the training data; None: unknown
    trained: float | None = None  # tokens of a row that are trained, those of all candidates; None: unknown
    pass_tokens: int | None = None  # of the passes that the run had before: kept where they fit
    parks: bool = False  # what passes hold between blocks waits in host memory

    @property
    def batch(self) -> int:
        """Rows of a pass, as far as they are known."""
        return max(1, self.tokens // self.length) if self.length and not self.chooses else 1

    @property
    def is_as_before(self) -> bool:
        return self.pass_tokens is not None and self.length is not None and self.tokens == self.pass_tokens

    def split(self, rows: int) -> Workload:
        """The same step, every pass of which is split into several of at most so many rows."""
        parts = -(-self.batch // rows)
        if parts == 1:
            return self
        assert self.length is not None
        return replace(self, tokens=-(-self.batch // parts) * self.length, passes=self.passes * parts)


@dataclass(frozen=True)
class Room:
    """What a device offers: the formats of the weights, the bytes that libraries reserve per thread, and the most bytes
    that a method may fill with state (None: no known limit)."""

    formats: Wire
    workspace_bytes: int
    limit_bytes: int | None = None


class DeviceBytes(Protocol):
    """The parts of a planned device peak: a dataclass with one field per part."""

    @property
    def total(self) -> int: ...
    @property
    def during_a_step(self) -> int: ...


@dataclass(frozen=True)
class StepWork:
    """One step, in the quantities of work.py."""

    products: float = 0.0  # FLOPs
    touched: float = 0.0
    up: float = 0.0
    down: float = 0.0
    # Parameters that the CPU updates.
    adam: float = 0.0
    # Those of them whose update begins after the backward pass and ends before the next forward pass, so that nothing
    # hides it.
    exposed_adam: float = 0.0
    # Bytes of the gradients of these parameters, and of their steps, each way.
    exposed_bytes: float = 0.0
    launches: float = 0.0  # of the host
    nodes: float = 0.0
    # State in host memory.
    host_bytes: int = 0
    # State in a checkpoint, beside the weights.
    saved_bytes: int = 0
    # Activations that are kept on the device because there is room, beyond what the step needs.
    kept_bytes: int = 0
    # Passes whose rows share one product.
    together: int = 1
    # Forward passes over a block per micro-batch, with recomputation.
    forwards: float = 1.0
    # Blocks run as CUDA graphs.
    recorded: bool = False

    def plus(self, **more: float) -> StepWork:
        """A copy with these amounts added."""
        changed = {name: getattr(self, name) + value for name, value in more.items()}
        return replace(self, **changed)


HostState = Callable[
    ["Layout", set[int], int, "MethodSettings | None", dict[int, tuple[int, int]] | None], tuple[str, int]
]


@dataclass(frozen=True)
class Formulas:
    """The formulas of a method. host_state(layout, streamed, bytes of an element, settings, cut): what it keeps in host
    memory, in words and bytes (cut: what this rank keeps of sharded units); None: nothing that could be too much."""

    device_bytes: Callable[[Layout, set[int], Workload, Room], DeviceBytes]
    step_work: Callable[[Layout, set[int], Workload, Room, Rates], StepWork]
    host_state: HostState | None = None
