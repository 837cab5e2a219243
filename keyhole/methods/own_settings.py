"""Settings of a method that are given in Python: checked as a config's are, and fixed once the method is made.

A method reads its settings when it is made: buffers, estimators and optimizers have their sizes and numbers from them.
A setting that is written into the method later would have no effect, or an effect on a part of the step only (the
losses of `zo` would be taken at another eps than its slope is divided by), so it is refused. `lr` may change; it is
checked before every step (`checked_rate`).
"""

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from keyhole.errors import UserError
from keyhole.limits import Limit, NotNegative, Positive, Seed

SHARED: dict[str, Any] = {
    "weight_decay": NotNegative,
    "max_grad_norm": Positive | None,
    "seed": Seed,
}
FIXED = {*SHARED, "weight_decay_on", "model_dropout"}
OF_OTHERS = {"learning_rate", "betas", "momentum"}  # what other libraries call theirs
COMPILE = "compile"  # may also name a backend of torch.compile


def check_settings(name: str, given: Mapping[str, Any]) -> None:
    """UserError for a setting, of this method or of all, that is not of its type or outside of its bounds."""
    kinds = SHARED | _kinds(name)
    for key, value in given.items():
        if key in kinds and not _fits(value, kinds[key]) and not (key == COMPILE and isinstance(value, str)):
            where = key if key in SHARED else f"{name.replace('-', '_')}.{key}"  # as in a config
            raise UserError(f"{where}: found {value!r}, expected {_words(kinds[key])}")


def refuse_change(name: str, key: str) -> None:
    """UserError if this attribute of a method is one of its settings, or looks like one."""
    if key in FIXED or key in OF_OTHERS or key in _kinds(name):
        what = "it is called lr here" if key == "learning_rate" else "give it when the method is made"
        raise UserError(
            f"{name}: {key} cannot be changed, and would have no effect or half of one: {what}. (lr may be changed. To "
            "change a setting, call flush(), make a method again, and give it the state: load_state_dict)"
        )


def checked_rate(lr: Any) -> float:
    """A learning rate as a float; UserError if it is none. One number in a tensor or an array is a rate too, as for
    torch's optimizers."""
    try:
        lr = lr.item()
    except (AttributeError, RuntimeError, ValueError):  # a number already, or several
        pass
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not math.isfinite(lr) or lr < 0:
        raise UserError(f"lr: {lr!r} is no learning rate; a number of at least 0 is needed")
    return float(lr)


@cache
def _kinds(name: str) -> dict[str, Any]:
    from keyhole.methods import METHODS  # here: the table imports the rows

    if name not in METHODS:
        return {}
    own = METHODS[name].settings
    hints = typing.get_type_hints(own, include_extras=True)
    return {each.name: hints[each.name] for each in fields(own)}


def _fits(value: Any, kind: Any) -> bool:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _fits(value, args[0]) and args[1].holds(value)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arm) for arm in args)
    if origin is list:
        return isinstance(value, list | tuple) and all(_fits(one, args[0]) for one in value)
    if kind is float or kind is int:
        is_number = isinstance(value, Real if kind is float else Integral) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    return isinstance(value, kind)


def _words(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        limit: Limit = args[1]
        return f"{_words(args[0])} {limit.describe()}"
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_words, args))
    if origin is list:
        return f"a list of {args[0].__name__}"
    names = {float: "a number", int: "a whole number", bool: "True or False", str: "text"}
    return names.get(kind, "None")
