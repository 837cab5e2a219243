"""The methods that train a model, and the interface between them, the model and the plan that placed it. A new method
attaches:

    name       is compared with the method that the plan was made for
    deferred   a function that applies updates that the weights at home still lack
    addon      trained weights beside the model's own (adapters), which are saved and checked with the model

The model applies deferred updates before its weights are read or another method trains them, also after the method that
deferred them was deleted. A caller may also use the module by itself, as any PyTorch module (forward/hooks.py notices):
then the updates are applied first, too, and after the next step autograd refuses to differentiate the caller's graph,
because it was built with older weights. What a caller changes in the module by hand (by_hand.py) is taken up before the
weights are used again, or refused while a method still has an update to write.
"""

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import increment_version

from keyhole.errors import UserError, listed, warn
from keyhole.model.structure.added_loss import check_loss
from keyhole.model.structure.layout import FlatTensor
from keyhole.ops.autocast import without_autocast

if TYPE_CHECKING:
    from keyhole.model.model import Model


class Addon(Protocol):
    """Trained weights beside the model's own."""

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """These weights, by name."""

    def as_saved(self, tensor: FlatTensor, home: torch.Tensor) -> torch.Tensor:
        """A weight of the model as it is saved: `home`, or a copy with the addon's part added."""

    def write_files(self, path: Path) -> None:
        """Adds the files of the addon to a model directory."""


class Attached(Protocol):
    """A method, as the model sees it."""

    name: str
    keeps_base: bool
    """Whether the weights of blocks are frozen."""

    @property
    def deferred(self) -> Callable[[], None] | None:
        """A function that applies the updates that the weights at home lack; None if updates are never deferred. The
        model keeps it, so it must not hold a reference to the method or the model."""

    @property
    def is_settled(self) -> bool:
        """Whether the weights at home hold all of its updates."""

    @property
    def is_whole(self) -> bool:
        """Whether the last step was applied to all weights, or to none."""

    @property
    def addon(self) -> Addon | None:
        """None if the method trains only the model's own weights."""


class Placed(Protocol):
    """The plan by which a model was placed (plan/placement.py)."""

    reasons: list[str]
    device_bytes: Any  # and work: of keyhole.plan, a later layer
    budget_bytes: int | None
    limit_bytes: int | None
    workspace_bytes: int
    work: Any
    adapter: Any
    is_for_another_method: bool

    def evaluation_passes(self, layout: Any, most: int) -> int:
        """How many batches of the planned size may go through the model together."""

    def check_method(self, method: str) -> None:
        """Refuses a method that cannot train this model; warns if the plan was made for another one."""

    def warn_if_larger(self, tokens: int) -> None:
        """Warns once of a batch with more tokens than the plan was made for."""


class AttachedMethods:
    """The methods that were made on a model, as far as their updates are not at home yet, and the steps they made."""

    def __init__(self, model: "Model") -> None:
        self.model: Model = weakref.proxy(model)  # which holds this object
        self.steps = 0  # by all methods: one that keeps a copy of the weights sees that another has changed them
        self.changes = 0  # by hand, as often as some were found: the same for them
        self.is_flushed = False  # since the last step: the caller may change weights in any way
        self._steps_now = False
        self._turn = threading.RLock()  # held by the thread that makes a step
        self._writes = False  # the last step may still be writing homes
        self.trained: weakref.WeakKeyDictionary[Attached, list[bool]] = weakref.WeakKeyDictionary()  # when it was made
        self._attached: weakref.WeakSet[Attached] = weakref.WeakSet()
        self._deferred: list[tuple[weakref.ref[Attached], Callable[[], None]]] = []  # methods that defer updates
        self._has_graph = False  # the module was called by itself, with gradients, since the last step

    def check_new(self, name: str) -> None:
        """Called before a method of this name is made: refuses one that would replace adapters, or train below them."""
        if self.model.placed is not None:
            self.model.placed.check_method(name)
        if self.model.addon is not None:
            raise UserError(
                f"model: it has adapters already, of a lora or lomo-lora that was made on it before, and {name} would "
                "replace them, or train below them. Go on with that object (opt.lr = .. sets another rate, "
                "opt.load_state_dict(..) another state). Or save what was learned (model.save_pretrained(path)) and "
                "load that, once adapters that lie in path/adapter are merged (PeftModel.from_pretrained(model, "
                "adapter).merge_and_unload()). To begin again without them, load the model again"
            )

    def attach(self, method: Attached) -> None:
        """Called for a new method. Updates that other methods have deferred are applied first."""
        check_loss(self.model.config)
        if self._attached:
            self.take_changes(method)
        if self.model.formats.frozen is not None and not method.keeps_base:
            raise UserError(
                f"wire: {self.model.formats.name} weights are frozen, and {method.name} would change them: their "
                "grid is too coarse for updates. Use a method that learns beside them (lora, or zo with rank=2, "
                "fold=False), or wire=bf16"
            )
        self.apply_deferred()
        self.model.engine.wait_for_homes()  # the new method may read them at once; another may still be writing them
        if self.model.low_rank is not None:
            self.model.low_rank.settle()
        self.model.by_hand.check_parameters(self._beside(method))
        self.take_changes(method)
        self._deferred = [(owner, apply) for owner, apply in self._deferred if owner() is not None]  # these may step on
        if method.deferred is not None:
            self._deferred.append((weakref.ref(method), method.deferred))
        self.model.addon = method.addon or self.model.addon  # adapters stay in the module
        self._attached.add(method)
        self.trained[method] = [tensor.param.requires_grad for tensor in self.model.layout.tensors]
        self.model.by_hand.note()

    def _beside(self, method: Attached | None = None) -> list[nn.Parameter]:
        added = None if method is None else method.addon
        addons = [addon for addon in (self.model.addon, added) if addon is not None]
        return [param for addon in addons for param in addon.params.values()]

    def take_changes(self, new: Attached | None = None, pointed: bool = True) -> None:
        """Called before weights are used: takes up what the caller has changed by hand. UserError for a change that
        cannot be, once: then the weights are what they are. new: a method that is being attached; its weights beside
        the model's own are in the module already. pointed: also weights that parameters were pointed to."""
        if self._steps_now or self.model.conductor is not None or self.model.lens is not None:
            return  # within a step or a pass
        if self.is_flushed and self.model.engine.streamed:
            self.model.engine.invalidate()
        if self._attached:
            self.model.by_hand.check_parameters(self._beside(new))
        changed = self.model.by_hand.take(pointed)
        if not changed:
            return
        self.changes += 1
        self.model.engine.invalidate()
        late = next((method.name for method in self._attached if not method.is_settled), None)
        if late is not None or self._writes:
            raise UserError(
                f"model: {listed(changed)} was changed by hand while the last step"
                f"{'' if late is None else ' of ' + late} was still to be written, and the two are mixed now. Call "
                "flush() of the method before you change weights; then write them again"
            )
        factors, tensors = self.model.low_rank, self.model.layout.tensors
        beside = {t.name for t in tensors if factors is not None and factors.sample(t) is not None}
        if beside & set(changed):
            raise UserError(
                f"model: {listed(sorted(beside & set(changed)))} was changed by hand, but the low-rank factors that "
                "were trained beside it would be added to the new weights. Save the model, load it, and change that"
            )

    @without_autocast()
    def apply_deferred(self, before_step_of: Attached | None = None) -> None:
        """Afterwards the weights at home are those after the last step of every method; with before_step_of, of every
        other method."""
        for owner, apply in self._deferred:
            if before_step_of is None or owner() is not before_step_of:
                apply()

    def used_directly(self, what: str) -> None:
        """Called before the module's own forward or save_pretrained: its parameters must be those after the last step.
        UserError where they cannot be."""
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint is recomputed, on a GPU in autograd's thread
            self.check_turn()
        if self.model.lens is not None:
            raise UserError(
                f"closure: the module's own {what} does not see the perturbed weights, and its number would say "
                "nothing of them; compute it from model.nll(batch), model.logits(batch) or model.generate(ids)"
            )
        if self.model.low_rank is not None and (what != "forward" or torch.is_grad_enabled()):
            raise UserError(
                f"module.{what}: the weights lack the low-rank factors that were trained beside them; use "
                "model.save_pretrained to save, and torch.no_grad() or model.nll(batch) to evaluate"
            )
        evaluates = what == "forward" and self.model.is_plain and not torch.is_grad_enabled()
        self._settle(pointed=not evaluates)
        self._has_graph = self._has_graph or (what == "forward" and torch.is_grad_enabled())

    def settle(self) -> None:
        """Called before the module's own state_dict and load_state_dict: its parameters are those after the last step,
        or what the caller has pointed them to. Not within a step or a pass; nor on several ranks, where one of them may
        call alone."""
        within = self._steps_now or self.model.conductor is not None or self.model.lens is not None
        if self._attached and not within and not self.model.ranks.several and not self.model.sharded:
            self._settle(pointed=not self.model.is_plain)

    def _settle(self, pointed: bool) -> None:
        self.take_changes(pointed=pointed)
        self.apply_deferred()
        if self.model.engine.gate is not None or self.model.engine.streamed:
            self.model.engine.wait_for_homes()
            self._writes = False

    def warn_of_part(self) -> None:
        """Called before the model is saved: warns if a step was broken off, and its weights mix two steps."""
        for name in (method.name for method in self._attached if not method.is_whole):
            warn(
                f"save_pretrained: the last step of {name} was applied to a part of the weights only (an interrupt, an "
                "error, a gradient that is not finite), so what is saved mixes two steps; go on from a checkpoint",
            )

    def step_done(self) -> None:
        """Called after a step: autograd refuses to differentiate a graph that the module built with older weights."""
        self.steps += 1
        if self._has_graph:
            increment_version([tensor.param for tensor in self.model.layout.tensors])
            self._has_graph = False

    def check_turn(self) -> None:
        """UserError if another thread makes a step."""
        self._take_turn()
        self._turn.release()

    def _take_turn(self) -> None:
        if not self._turn.acquire(blocking=False):
            raise UserError(
                "model: another thread is in the middle of a step, which changes the weights; one thread at a time may "
                "call step, nll, logits or generate of a model: call them before or after, or take turns by a lock"
            )

    def step_begins(self) -> None:
        """Called before a step, whose end `step_ends` reports. UserError if another thread makes one."""
        self._take_turn()
        self._steps_now = True

    def step_ends(self) -> None:
        """Called after a step, also one that ended in an error."""
        self._turn.release()
        self.is_flushed = self._steps_now = False
        self._writes = self.model.engine.cuda and bool(self.model.engine.streamed)
        self.model.by_hand.note()

    def flushed(self) -> None:
        """Called after the flush of a method. The caller may change weights through `.data` now, of which torch does
        not tell: until the next step, nothing that was uploaded before is used. (Ranks upload together: theirs is.)"""
        if self._steps_now or self.model.ranks.several or self.model.sharded:
            return
        self.model.engine.wait_for_homes()
        self.is_flushed, self._writes = True, False

    def homes_written(self) -> None:
        """Called after other code has written homes, as a caller may by hand."""
        self.changes += 1
        self.model.engine.invalidate()
