"""The methods that train a model, what the caller changes by hand, and the interface between model and methods. A new
method attaches:

    name       is compared with the method that the plan was made for
    deferred   a function that applies updates that the weights at home still lack
    addon      trained weights beside the model's own (adapters), which are saved and checked with the model

The model applies deferred updates before its weights are read or another method trains them, also after the method that
deferred them was deleted. A caller may also use the module by itself, as any PyTorch module (forward/hooks.py notices):
then the updates are applied first, too, and after the next step autograd refuses to differentiate the caller's graph,
because it was built with older weights.

A caller who has called `flush()` may read, copy and change weights. Before they are used again, three kinds of change
are looked for, in less than a microsecond per parameter:

    param.copy_(..), load_state_dict, init.*      torch counts changes in place (`param._version`): taken up, or refused
                                                  while a method still has an update to write
    param.data = other                            the parameter does not point to its home: refused. The module's own
                                                  forward without gradients uses the other weights as they are, if it
                                                  can: averaged weights are evaluated like that
    module.weight = nn.Parameter(..), a new       the module no longer holds the parameter that is trained: refused
    module, resize_token_embeddings

Torch does not count a change through an alias (`param.data.copy_(..)`). After a flush, and until the next step, weights
are therefore taken from their homes again.
"""

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from itertools import chain
from operator import attrgetter, is_
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.autograd.graph import increment_version

from keyhole.errors import Mixed, UserError, listed
from keyhole.model.forward.binding import DeviceWeights
from keyhole.model.forward.low_rank import LowRank
from keyhole.model.spare_memory import Placed
from keyhole.model.structure.config_files import check_loss
from keyhole.model.structure.layout import FlatTensor
from keyhole.ops.autocast import computing, without_autocast
from keyhole.ranks import Ranks
from keyhole.weak import P, R, leaves_no_frames

VERSION = attrgetter("_version")


def computes(call: Callable[P, R]) -> Callable[P, R]:
    """A decorator of what users call of a model: it is refused, or has its turn, and an error of it keeps nothing
    alive."""

    @leaves_no_frames
    @wraps(call)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        cast(Any, args[0]).check_idle()
        with computing():
            return call(*args, **options)

    return checked


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
    settings: Any
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
        """Whether the last step was applied to all weights, or to none. Waits until that is known."""

    @property
    def addon(self) -> Addon | None:
        """None if the method trains only the model's own weights."""

    def close(self) -> None:
        """Ends what works for the method on the host."""


class AttachedMethods:
    """The methods that were made on a model, as far as their updates are not at home yet, and the steps they made."""

    def __init__(self, module: nn.Module, weights: DeviceWeights, ranks: Ranks, placed: Placed | None) -> None:
        self.module, self.weights, self.ranks, self.placed = module, weights, ranks, placed
        self.engine, self.layout, self.formats = weights.engine, weights.layout, weights.formats
        self.addon: Addon | None = None
        self.low_rank: LowRank | None = None  # factors trained beside the weights of linear layers
        self.in_pass = False
        self.steps = 0  # by all methods: one that keeps a copy of the weights sees that another has changed them
        self.changes = 0  # by hand, as often as some were found: the same for them
        self.is_flushed = False  # since the last step: the caller may change weights in any way
        self.trained: weakref.WeakKeyDictionary[Attached, list[bool]] = weakref.WeakKeyDictionary()  # when it was made
        self.stepping: Attached | None = None  # within its step
        self.process = os.getpid()
        self._turn = threading.RLock()  # held by the thread that makes a step
        self._writes = False  # the last step may still be writing homes
        self._deferred: list[tuple[weakref.ref[Attached], Callable[[], None]]] = []  # methods that defer updates
        self._has_graph = False  # the module was called by itself, with gradients, since the last step
        self._loaded = {id(param) for param in module.parameters()}  # they live as long as the module
        self._params = [tensor.param for tensor in self.layout.tensors]
        self._versions: list[int] | None = None  # of parameters, after the last step; None: no method was made yet
        self._plain: list[FlatTensor] = []  # whose parameters point to their homes, and the addresses of these
        self._addresses: list[int] = []
        self.parts = list(module.modules())  # the module and all modules in it, when it was last checked, and
        self._tables: list[dict[str, Any]] = []  # their parameters and modules by name
        self._members: list[object] = []  # the values of these tables

    def check_new(self, name: str) -> None:
        """Called before a method of this name is made: refuses one that would replace adapters, or train below them."""
        if self.placed is not None:
            self.placed.check_method(name)
        if self.addon is not None:
            raise UserError(
                f"model: it has adapters already, of a lora or lomo-lora that was made on it before, and {name} would "
                "replace them, or train below them. Go on with that object (opt.lr = .. sets another rate, "
                "opt.load_state_dict(..) another state). Or save what was learned (model.save_pretrained(path)) and "
                "load that, once adapters that lie in path/adapter are merged (PeftModel.from_pretrained(model, "
                "adapter).merge_and_unload()). To begin again without them, load the model again"
            )

    def attach(self, method: Attached) -> None:
        """Called for a new method. Updates that other methods have deferred are applied first."""
        check_loss(self.module.config)
        if self.trained:
            self.take_changes(method)
        if self.formats.frozen is not None and not method.keeps_base:
            raise UserError(
                f"wire: {self.formats.name} weights are frozen, and {method.name} would change them: their "
                "grid is too coarse for updates. Use a method that learns beside them (lora, or zo with rank=2, "
                "fold=False), or wire=bf16"
            )
        self.apply_deferred()
        self.engine.wait_for_homes()  # the new method may read them at once; another may still be writing them
        self.check_whole()
        if self.low_rank is not None:
            self.low_rank.settle()
        self.take_changes(method)
        self._deferred = [(owner, apply) for owner, apply in self._deferred if owner() is not None]  # these may step on
        if method.deferred is not None:
            self._deferred.append((weakref.ref(method), method.deferred))
        self.addon = method.addon or self.addon  # adapters stay in the module
        self.trained[method] = [tensor.param.requires_grad for tensor in self.layout.tensors]
        self._versions = list(map(VERSION, self._params))

    # -- changes by hand ---------------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        """Within a step or a pass."""
        return self.stepping is not None or self.in_pass or self.weights.replacement is not None

    def take_changes(self, new: Attached | None = None, pointed: bool = True) -> None:
        """Called before weights are used: takes up what the caller has changed by hand. UserError for a change that
        cannot be; a change in place is reported once: then the weights are what they are. new: a method that is being
        attached; its weights beside the model's own are in the module already. pointed: parameters must point to their
        homes."""
        if self._is_busy:
            return
        self._check_process()
        if self.is_flushed and self.engine.streamed:
            self.engine.invalidate()
        if self.trained or new is not None:
            self._check_parameters(new)
        if not self._plain:
            homes = self.weights.homes
            self._plain = [tensor for tensor in self.layout.tensors if not homes.is_apart(tensor)]
            self._addresses = [homes.read(tensor).data_ptr() for tensor in self._plain]
        if pointed and self._addresses != [tensor.param.data_ptr() for tensor in self._plain]:
            pairs = zip(self._plain, self._addresses, strict=True)
            raise UserError(
                f"model: {listed([tensor.name for tensor, at in pairs if tensor.param.data_ptr() != at])} was pointed "
                "to other memory after keyhole.load (param.data = .., module.to(..)), which is neither trained nor "
                "saved. Point it back, and write into the parameter: param.copy_(..) under torch.no_grad() after "
                "flush(); a backup is param.detach().clone(), and another dtype is given to keyhole.load"
            )
        before, now, tensors = self._versions, list(map(VERSION, self._params)), self.layout.tensors
        if before is None or before == now:
            return
        changed = [tensor.name for tensor, old, new in zip(tensors, before, now, strict=True) if old != new]
        self._versions = now
        self.changes += 1
        self.engine.invalidate()
        late = next((method.name for method in self.trained if not method.is_settled), None)
        if late is not None or self._writes:
            raise UserError(
                f"model: {listed(changed)} was changed by hand while the last step"
                f"{'' if late is None else ' of ' + late} was still to be written, and the two are mixed now. Call "
                "flush() of the method before you change weights; then write them again"
            )
        beside = {t.name for t in tensors if self.low_rank is not None and self.low_rank.sample(t) is not None}
        if beside & set(changed):
            raise UserError(
                f"model: {listed(sorted(beside & set(changed)))} was changed by hand, but the low-rank factors that "
                "were trained beside it would be added to the new weights. Save the model, load it, and change that"
            )

    def _check_parameters(self, new: Attached | None) -> None:
        """UserError if the module has lost a parameter that was loaded, or has one that was not and no method added."""
        members = list(chain.from_iterable(map(dict.values, self._tables)))
        if self._tables and len(members) == len(self._members) and all(map(is_, members, self._members)):
            return
        addons = [addon for addon in (self.addon, None if new is None else new.addon) if addon is not None]
        known = self._loaded | {id(param) for addon in addons for param in addon.params.values()}
        there = dict(self.module.named_parameters())
        ids = {id(param) for param in there.values()}
        gone = next((tensor.name for tensor in self.layout.tensors if id(tensor.param) not in ids), None)
        if gone is not None:
            raise UserError(
                f"model: {gone} was replaced or resized after keyhole.load, and the new weights would be neither "
                "trained nor saved; save a model with the weights it needs first (AutoModelForCausalLM, "
                "save_pretrained), and load that. To change values only, write into the parameter: param.copy_(..)"
            )
        added = next((name for name, param in there.items() if id(param) not in known), None)
        if added is not None:
            raise UserError(
                f"model: {added} was added to the module after keyhole.load, and would be neither trained nor saved; "
                "save a model that has it, and load that (adapters: method lora or lomo-lora)"
            )
        self.parts = list(self.module.modules())
        self._tables = [table for one in self.parts for table in (one._parameters, one._modules)]
        self._members = list(chain.from_iterable(map(dict.values, self._tables)))

    def homes_written(self) -> None:
        """Called after other code has written homes, as a caller may by hand."""
        self.changes += 1
        self.engine.invalidate()

    # -- deferred updates --------------------------------------------------------------------------------------------

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
        if self.weights.replacement is not None:
            raise UserError(
                f"closure: the module's own {what} does not see the perturbed weights, and its number would say "
                "nothing of them; compute it from model.nll(batch), model.logits(batch) or model.generate(ids)"
            )
        if self.low_rank is not None and (what != "forward" or torch.is_grad_enabled()):
            raise UserError(
                f"module.{what}: the weights lack the low-rank factors that were trained beside them; use "
                "model.save_pretrained to save, and torch.no_grad() or model.nll(batch) to evaluate"
            )
        evaluates = what == "forward" and self.weights.is_plain and not torch.is_grad_enabled()
        self._settle(pointed=not evaluates)
        self._has_graph = self._has_graph or (what == "forward" and torch.is_grad_enabled())

    def settle(self) -> None:
        """Called before the module's own state_dict and load_state_dict: its parameters are those after the last step,
        or what the caller has pointed them to. Not within a step or a pass; nor on several ranks, where one of them may
        call alone."""
        if self.trained and not self._is_busy and not self.ranks.several and not self.engine.parts():
            self._settle(pointed=not self.weights.is_plain)

    def _settle(self, pointed: bool) -> None:
        with nullcontext() if self._is_busy else computing():  # a step's recomputation may be in autograd's thread
            self.take_changes(pointed=pointed)
            self.apply_deferred()
            if self.engine.gate is not None or self.engine.streamed:
                self.engine.wait_for_homes()
                self._writes = False

    def check_whole(self) -> None:
        """Called before weights or a state are written, or trained on: Mixed if a step was applied to a part of them.
        Whatever writes goes through one of its callers (weights/save.py, Method.state_dict and flush)."""
        for name in (method.name for method in self.trained if not method.is_whole):
            raise Mixed(
                f"{name}: a gradient was not finite, or an error came in between, and a part of the last step had been "
                "applied: the weights in memory are not usable, and are not saved. Go on from the last checkpoint; "
                "with max_grad_norm set, gradients that are not finite are found before anything changes"
            )

    def step_done(self) -> None:
        """Called after a step: autograd refuses to differentiate a graph that the module built with older weights."""
        self.steps += 1
        if self._has_graph:
            increment_version([tensor.param for tensor in self.layout.tensors])
            self._has_graph = False

    def check_turn(self) -> None:
        """UserError if another thread makes a step."""
        self._take_turn()
        self._turn.release()

    def _check_process(self) -> None:
        if os.getpid() != self.process:  # of the model, a copy without its threads and without CUDA
            raise UserError(
                "model: this process was forked from the one that loaded the model, without its threads and without "
                "CUDA, and cannot compute with it; load the model in the process that uses it (multiprocessing: "
                "get_context('spawn'))"
            )

    def _take_turn(self) -> None:
        self._check_process()
        if not self._turn.acquire(blocking=False):
            raise UserError(
                "model: another thread is in the middle of a step, which changes the weights; one thread at a time may "
                "call step, nll, logits or generate of a model: call them before or after, or take turns by a lock"
            )

    def step_begins(self, method: Attached) -> None:
        """Called before a step of this method, whose end `step_ends` reports. UserError if another thread makes one."""
        self._take_turn()
        self.stepping = method

    def step_ends(self) -> None:
        """Called after a step, also one that ended in an error."""
        self._turn.release()
        self.is_flushed, self.stepping = False, None
        self._writes = self.engine.cuda and bool(self.engine.streamed)
        self._versions = list(map(VERSION, self._params))

    def flushed(self) -> None:
        """Called after the flush of a method. The caller may change weights through `.data` now, of which torch does
        not tell: until the next step, nothing that was uploaded before is used. (Ranks upload together: theirs is.)"""
        if self.stepping is not None or self.ranks.several or self.engine.parts():
            return
        self.engine.wait_for_homes()
        self.is_flushed, self._writes = True, False
