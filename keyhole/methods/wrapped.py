"""What every method does around its own code: wrappers for the functions that a subclass of Method defines.

    __init__           afterwards the settings are fixed (own_settings.py)
    step, backward     compute in the model's dtype, even under the caller's autocast (ops/autocast.py), with the rate
                       that a torch scheduler has set. What the caller has changed by hand is taken up first
                       (model/by_hand.py) or refused (step_checks.py). Afterwards the model is told that its weights
                       have changed
    flush              tells the model that the updates are at home, so that the caller may change weights
    state_dict, deferred_state   add the name of the method and a fingerprint of the model's tensors
    load_state_dict    refuses the state of another method or model

All but state_dict and deferred_state run outside of the caller's no_grad and inference mode, because a method keeps
tensors for later steps. torch is imported inside of functions: the rows of methods are read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from keyhole.disk.tensors import without
from keyhole.errors import UserError
from keyhole.methods.own_settings import checked_rate
from keyhole.methods.step_checks import check_step, drop_gradients

if TYPE_CHECKING:
    from keyhole.methods.base import Method

State = dict[str, Any]
METHOD, TENSORS = "method", "tensors"  # in a state: the name of its method, and the fingerprint of its model's tensors


def wrap(cls: type[Method]) -> None:
    """Replaces the functions that this class itself defines; those of its bases are wrapped already."""
    wrappers = {
        "__init__": _then_fixed,
        "step": _as_step,
        "backward": _as_step,
        "flush": _then_at_home,
        "state_dict": _with_name,
        "deferred_state": _with_name,
        "load_state_dict": _if_its_own,
    }
    for name, wrapper in wrappers.items():
        if name in vars(cls):
            setattr(cls, name, wrapper(vars(cls)[name]))


def _then_fixed(init: Callable[..., None]) -> Callable[..., None]:
    """An __init__ after which settings cannot be changed. Only that of the object's own class fixes them: those of its
    bases, which it calls, are wrapped too."""

    @wraps(init)
    def making(self: Method, *args: Any, **options: Any) -> None:
        from keyhole.ops.autocast import with_gradients

        with with_gradients():
            init(self, *args, **options)
        self._is_made = type(self).__init__ is making

    return making


def _as_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that checks what the caller has done since the last one, and tells the model when it begins and ends."""

    @wraps(step)
    def exact(*args: Any, **options: Any) -> Any:
        from keyhole.ops.autocast import with_gradients, without_autocast

        if not args:
            return step(*args, **options)  # the error of a missing self
        method = args[0]
        shell = vars(method).get("_torch_optimizer")
        method.lr = checked_rate(method.lr)
        if shell is not None:
            shell.sync()
        if method.model.lens is not None:
            raise UserError("closure: steps do not nest: a method steps inside of the closure of another step")
        method.model.check_idle()
        with without_autocast(), with_gradients():
            method.model.methods.take_changes()
            check_step(method)
            method.model.methods.step_begins()
            try:
                found = step(*args, **options)
                method.model.methods.step_done()
            except BaseException:
                drop_gradients(method)
                raise
            finally:
                method.model.methods.step_ends()
        return found

    return exact


def _then_at_home(flush: Callable[..., None]) -> Callable[..., None]:
    """A flush that tells the model that a method's updates are at home: the caller may change weights now."""

    @wraps(flush)
    def flushing(self: Method) -> None:
        from keyhole.ops.autocast import with_gradients

        with with_gradients():
            self.model.methods.take_changes()
            flush(self)
            self.model.methods.flushed()

    return flushing


def _with_name(state_of: Callable[..., State | None]) -> Callable[..., State | None]:
    """A state that says whose it is: the names and shapes in it may be those of another method."""

    @wraps(state_of)
    def named(self: Method) -> State | None:
        state = state_of(self)
        return None if state is None else {METHOD: self.name, TENSORS: self.model.layout.fingerprint} | state

    return named


def _if_its_own(load: Callable[..., None]) -> Callable[..., None]:
    """A load_state_dict that refuses the state of another method or model, and what is no state at all."""

    @wraps(load)
    def checked(self: Method, state: State) -> None:
        from keyhole.ops.autocast import with_gradients

        found = state.get(METHOD, self.name) if isinstance(state, Mapping) else self.name  # older states have no name
        if found != self.name:
            raise UserError(f"{self.name}: this is the state of another method, {found}; make that method, and load it")
        if isinstance(state, Mapping) and state.get(TENSORS, own := self.model.layout.fingerprint) != own:
            raise UserError(f"{self.name}: this is the state of another model: names or shapes of parameters differ")
        try:
            with with_gradients():
                load(self, without(state, METHOD, TENSORS))
        except UserError:
            raise
        except RuntimeError as error:
            if "must match the size" not in str(error):  # torch's words for other shapes
                raise
            raise UserError(
                f"{self.name}: the state is of another model, or of other settings, and does not fit: make the method "
                f"as it was made when the state was saved ({error})"
            ) from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                f"{self.name}: this is not a state that {type(self).__name__}.state_dict returned "
                f"({type(error).__name__}: {error})"
            ) from error

    return checked
