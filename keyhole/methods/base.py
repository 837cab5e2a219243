"""What a method is: the class that the training loop, checkpoints and users call.

A method lives in one folder:

    traits.py    its settings, and its row (methods/traits.py): rates, formats, bytes, what may change on resume
    method.py    a subclass of Method (more files as needed)
    memory.py    the bytes that it needs, as functions of shapes (methods/workload.py)

It has one line in the table of methods/__init__.py. A subclass defines __init__, step, state_dict and load_state_dict.
What a subclass defines is wrapped (wrapped.py), so that a caller's autocast, scheduler or change by hand means the same
to every method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keyhole.errors import UserError
from keyhole.methods.own_settings import check_settings, refuse_change
from keyhole.methods.wrapped import State, wrap

if TYPE_CHECKING:
    import torch
    from torch import nn

    from keyhole.methods.torch_optimizer import TorchOptimizer
    from keyhole.model.attached import Addon
    from keyhole.model.batch import Batch
    from keyhole.model.forward.low_rank import LowRank
    from keyhole.model.model import Model
    from keyhole.model.structure.layout import Layout, Unit


@dataclass(frozen=True)
class Shared:
    """The settings of a run that all methods share."""

    learning_rate: float | str  # "auto" only if the method can search a rate (Traits)
    weight_decay: float = 0.0
    weight_decay_on: str = "matrices"
    max_grad_norm: float | None = None
    model_dropout: bool = True
    seed: int = 0


@dataclass
class Skeleton:
    """A model by its modules and shapes, without weights."""

    module: nn.Module
    layout: Layout
    blocks: list[nn.Module]


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
    params: dict[str, torch.nn.Parameter] | None = None
    """What an optimizer of torch trains for it, by name; None: the model's own parameters that require gradients."""
    may_freeze: bool = True
    """Whether parameters may be frozen between its steps: it trains what gets a gradient."""
    _is_made: bool = False
    light: bool = False
    """Whether its checkpoints hold only its own tensors (Traits.light)."""

    def __init_subclass__(cls) -> None:
        """Wraps what the subclass defines (wrapped.py)."""
        wrap(cls)

    def __new__(cls, *args: Any, **options: Any) -> Method:
        """Refuses an argument that is not a model, settings outside of their bounds, and a model with adapters."""
        from keyhole.model.model import Model

        model = args[0] if args else options.get("model")
        if not isinstance(model, Model):
            found = "nothing" if model is None else f"a {type(model).__name__}"
            raise UserError(
                f"{cls.name}: found {found}, expected the model that keyhole.load returns: "
                f'keyhole.{cls.__name__}(keyhole.load("path-or-hub-id"), lr=...)'
            )
        check_settings(cls.name, options)
        model.methods.check_new(cls.name)
        return super().__new__(cls)

    def __init__(self, model: Model, lr: float | str, **settings: Any) -> None:
        raise NotImplementedError  # abstract

    if not TYPE_CHECKING:  # mypy would allow any attribute

        def __setattr__(self, name: str, value: Any) -> None:
            """Refuses another value for a setting, once the method is made."""
            if self._is_made:
                refuse_change(self.name, name)
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            f"{self.name}: a method belongs to its model, and is not copied or pickled; make another one, on a model "
            "that you load, and give it the state: load_state_dict(copy.deepcopy(method.state_dict()))"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, lr={self.lr:g})"

    @classmethod
    def make(cls, model: Model, shared: Shared, own: Any) -> Method:
        """The method as configured: the settings that all methods share, and its own section."""
        rules = {key: value for key, value in vars(shared).items() if key != "learning_rate"}
        return cls(model, shared.learning_rate, **rules, **vars(own))

    @classmethod
    def check_shapes(cls, base: Skeleton, own: Any) -> None:
        """UserError where making the method would be refused for the model's shapes; called before weights are read. It
        changes nothing. own: the method's section."""

    @classmethod
    def outline(cls, base: Any, own: Any) -> None:
        """Does to a module without weights what making the method does to the model: adds what is trained beside it,
        without memory, and freezes what is not trained. base: its module, layout and blocks; own: the method's section.
        UserError where making it would be refused for the model's shapes."""

    def step(self, batch: Batch | Sequence[Batch]) -> torch.Tensor:
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError  # abstract

    def flush(self) -> None:
        """Applies deferred updates: afterwards the weights at home are those after the last step, and the caller may
        change them."""
        self.model.methods.take_changes()
        self.model.methods.flushed()

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
    def is_settled(self) -> bool:
        """Whether the weights at home hold all updates made so far, so that a caller may change them."""
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the last step was applied to all weights, or to none."""
        return True

    @property
    def addon(self) -> Addon | None:
        """Trained weights beside the model's own; None if there are none."""
        return None

    # -- for checkpoints that are written while training goes on (checkpoint/writer.py) ------------------------------

    def owes(self, unit: Unit) -> bool:
        """Whether the unit's home lacks an update that its next visit will apply."""
        return False

    def deferred_state(self) -> State | None:
        """The state without a flush, if an update is deferred to the next step; None if nothing is deferred."""
        return None

    def call_before_update(self, callback: Callable[[], None]) -> None:
        """Registers a callback that runs before an update changes weights (traits: announces = "step")."""
        raise NotImplementedError  # abstract: only if the traits say so

    def learned_beside(self, state: Mapping[str, Any]) -> LowRank | None:
        """From a saved state: the factors that must be merged into a model's files before other programs can use them;
        None if there are none."""
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

    # -- for the journal (checkpoint/journal/), if the traits say so -------------------------------------------------

    def journal_update(self) -> torch.Tensor | None:
        """The numbers from which the last step's update can be recomputed, on the device."""
        return None
