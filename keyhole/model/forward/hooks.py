"""Where the module's forward calls the engine: hooks, without any change of model code.

Without a conductor, a caller uses the module by itself: the hook on the embedding and those before its
`save_pretrained`, `state_dict` and `load_state_dict` make the model apply updates that its weights lack
(`used_directly`, `settle`), the others do nothing. With one, a pass that enters

    a module of a unit whose weights it does not hold    waits there until the unit is bound (`meet`)
    a block                                              points the common unit vectors in it to the pass's own copy;
                                                         block_at_once: it first waits for all units of the block
    the input embedding                                  looks up rows that were gathered where the table lives

Compiled code cannot stop inside a block: with block_at_once the hooks inside do nothing. Hooks hold a weak reference to
the model, because the model holds the module, and the module its hooks.

A module with its own forward is a reference cycle: module -> forward -> closure -> module. Python frees a cycle only
when the garbage collector runs, and until then the parameters keep the memory of all weights. So every patch is
recorded here and removed when the model is closed or deleted: the module is then as Hugging Face made it, and reference
counting frees it at once. The list holds weak references to modules.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from keyhole.errors import Closed, UserError
from keyhole.model.forward.lockstep import Lockstep
from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.layout import Unit
from keyhole.weak import weakly


def install_hooks(model: Any) -> None:
    """Installs hooks on every module that needs a unit to be bound, every block, and the input embedding."""
    model_of = weakref.ref(model)

    def conductor_of() -> Lockstep | None:
        owner = model_of()
        return None if owner is None else owner.conductor

    def on_enter(unit: Unit) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            if torch.compiler.is_compiling():  # the block's units were met before it was entered
                return
            conductor = conductor_of()
            current = None if conductor is None else conductor.current
            if conductor is not None and current and not conductor.block_at_once and current.unit is not unit:
                current.meet(unit)

        return hook

    def on_block(block: int, units: list[Unit]) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            if (conductor := conductor_of()) is None:
                return
            if conductor.block_at_once:
                conductor.holds[conductor.current.index] = block, args[:1]  # the hidden states
                for unit in units:
                    conductor.current.meet(unit)
                conductor.holds.pop(conductor.current.index, None)
            owner: Any = model_of()
            owner.binding.enter_block(block)

        return hook

    def on_embed(module: nn.Module, args: tuple) -> tuple | None:
        if (conductor := conductor_of()) is None:
            if not torch.compiler.is_compiling() and (owner := model_of()) is not None:
                owner.methods.used_directly("forward")
            return None
        ids = args[0]
        rows_MH = conductor.rows(conductor.current.index, ids.flatten())
        if isinstance(rows_MH, nn.Parameter):  # a leaf, for a pass that will be differentiated
            module._parameters["weight"] = rows_MH
        else:
            module.weight.data = rows_MH
        return (torch.arange(ids.numel(), device=ids.device).view(ids.shape),)

    blocks = model.layout.of_kind("block")
    for unit in blocks:
        for owner in unit.modules:
            model.patches.pre_hook(owner, on_enter(unit))
    for block, owner in enumerate(find_blocks(model.module)):  # after on_enter, so that the unit is already bound
        model.patches.pre_hook(owner, on_block(block, [u for u in blocks if u.block == block]))
    model.patches.pre_hook(model.embedding, on_embed)
    model.patches.before_saving(model.module, partial(weakly(model.methods.used_directly), "save_pretrained"))
    model.patches.before_state_dict(model.module, weakly(model.methods.settle))


class _BeforeStateDict:
    """A hook before the state_dict of a module: calls once, however many modules the state_dict is of. With it in the
    module, pickle says what to do instead; a deep copy shares it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def __call__(self, *unused: object) -> None:
        if not _is_nested():
            self.call()

    def __deepcopy__(self, memo: object) -> "_BeforeStateDict":
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UserError(
            "model.module: it has hooks of keyhole's, and is not pickled. For another process, save it by "
            "model.save_pretrained(path) and load that there; its weights alone are model.module.state_dict()"
        )


class Patches(ExitStack):
    """The patches in the modules of one model; `close` removes them, and is safe to call again."""

    def pre_hook(self, module: nn.Module, hook: Callable) -> None:
        """Calls `hook` before the module's forward."""
        handle: RemovableHandle = module.register_forward_pre_hook(hook)
        self.callback(handle.remove)

    def before_saving(self, module: nn.Module, hook: Callable[[], None]) -> None:
        """Calls `hook` before the module's own save_pretrained, unless that is given the tensors to save."""
        if not hasattr(type(module), "save_pretrained"):
            return
        found: Callable[[], Any] = weakref.ref(module)
        own: Any = type(module)

        @wraps(own.save_pretrained)
        def save_pretrained(*args: object, **options: object) -> object:
            if options.get("state_dict") is None:
                hook()
            return type(found()).save_pretrained(found(), *args, **options)

        def undo() -> None:
            if (alive := found()) is not None:
                alive.__dict__.pop("save_pretrained", None)

        module.save_pretrained = save_pretrained  # type: ignore[assignment]
        self.callback(undo)

    def before_state_dict(self, module: nn.Module, hook: Callable[[], None]) -> None:
        """Calls `hook` before the state_dict of the module or of any module in it, once, and before its
        load_state_dict."""
        before = _BeforeStateDict(hook)
        for one in module.modules():
            self.callback(one.register_state_dict_pre_hook(before).remove)
        self.callback(module.register_load_state_dict_pre_hook(lambda *args: hook()).remove)

    def forward(self, module: nn.Module, forward: Callable) -> None:
        """Replaces the forward of this one module."""
        before, found = module.__dict__.get("forward"), weakref.ref(module)

        def undo() -> None:
            if (alive := found()) is not None:
                alive.__dict__.pop("forward", None)
                if before is not None:
                    alive.forward = before

        module.forward = forward
        self.callback(undo)


def empty(module: nn.Module) -> None:
    """Takes the memory of a module whose model is closed, and makes every call of it say so."""

    def refuse(*unused: object, **options: object) -> NoReturn:
        raise Closed

    for part in module.modules():
        for own in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            own.data, own.grad = torch.zeros((), dtype=own.dtype).expand(own.shape), None
        part.register_forward_pre_hook(refuse)
        part.register_state_dict_pre_hook(refuse)
    module.register_load_state_dict_pre_hook(refuse)
    module.save_pretrained = refuse  # type: ignore[assignment]


def _is_nested() -> bool:
    """Called in a hook: whether that state_dict was called by the state_dict of a module around it."""
    called = sys._getframe(2)
    return called.f_back is not None and called.f_back.f_code is called.f_code


@contextmanager
def replaced_forwards(modules: Sequence[Any], forwards: list[Callable]) -> Iterator[None]:
    """A context in which these modules have other forwards."""
    before = [module.__dict__.get("forward") for module in modules]
    for module, forward in zip(modules, forwards, strict=True):
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward
