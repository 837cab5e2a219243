"""Settings of a method: one frozen dataclass per method, which is its section of the config, the argument of its
constructor (`keyhole.LOMO(model, lr=1e-3, activations="host")`), and its rows in the docs.

A setting that several methods have is also one of the run: a field whose name, or whose `key`, is a key of the config's
top level is taken from there (config/fields.py). `python(...)` marks a setting without a key: an ablation, or one for
loops in Python. Types and bounds: limits.py.

The properties and functions of a dataclass are what its settings imply for the code around a method: how many forward
passes a step has, which settings contradict each other. Imports no torch.
"""

import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, Literal, Self

from keyhole.errors import UserError
from keyhole.limits import BatchSize, BelowOne, NotNegative, Positive, Seed, describe, fits

OTHERS = dict.fromkeys(("lr", "learning_rate"), "lr of the class itself, or learning_rate of KeyholeArguments")
FROZEN_WIRES = ("int8", "int4", "nf4")  # formats whose weights are never changed (ops/lowbit.py)
Fault = tuple[str, str]  # a key of the config, and the error in its value
Rates = tuple[float, tuple[float, float]]  # a learning rate, and the range of rates that worked


def python(default: object, doc: str) -> Any:
    """A field that has no key in a config, with its line in the help of the class."""
    return field(default=default, metadata={"python": True, "doc": doc})


def keyed(default: object, key: str) -> Any:
    """A field that has another name in a config."""
    return field(default=default, metadata={"key": key})


@dataclass(frozen=True)
class Around:
    """What a method's settings may contradict: how the model lies, and the run. max_steps: None if the data decide, or
    if it is unknown."""

    wire: str | None = None
    placement: str = "resident"
    max_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """Settings that all methods have."""

    # Keys of earlier versions in the method's section, and what to do instead.
    gone: ClassVar[dict[str, str]] = {}

    weight_decay: NotNegative = 0.0
    weight_decay_on: Literal["matrices", "all"] = "matrices"
    max_grad_norm: Positive | None = None
    model_dropout: bool = True
    deterministic: bool = True
    micro_batch_size: BatchSize | Literal["auto"] = "auto"
    seed: Seed = 0

    @property
    def keeps(self) -> str | None:
        """What is kept for the backward pass; None: the method has no such setting."""
        found: str | None = vars(self).get("activations")
        return found

    @property
    def is_compiled(self) -> bool:
        """Whether blocks run through torch.compile."""
        return bool(vars(self).get("compile"))

    @property
    def passes(self) -> int:
        """Forward passes per micro-batch."""
        return 1

    @property
    def light(self) -> bool:
        """Whether checkpoints hold only the method's tensors, which contain everything that has changed: a run resumes
        from the original model and these tensors."""
        return False

    @property
    def whole_blocks(self) -> bool:
        """Whether blocks must not be cut into smaller units."""
        return False

    @property
    def by_expert(self) -> bool:
        """Whether large stacks of experts may be cut into experts, which are streamed one by one."""
        return False

    @property
    def frozen_wires(self) -> tuple[str, ...]:
        """Formats whose weights are frozen that the method supports with these settings."""
        return ()

    @property
    def advice(self) -> tuple[str, ...]:
        """Settings (key=value) with which a step needs less memory."""
        return ("activations=auto",) if self.keeps in ("none", "block") else ()

    def filled(self) -> Self:
        """These settings with unset values filled in, if a default depends on another setting."""
        return self

    def rates(self, usual: Rates) -> Rates:
        """The default rate and the range that worked, given those of the method's row."""
        return usual

    def faults(self, around: Around) -> Iterator[Fault]:
        """Every contradiction between these settings, or with what is around."""
        yield from ()

    def idle(self, around: Around) -> Iterator[Fault]:
        """Settings that differ from their defaults and that others make meaningless, and why."""
        yield from ()


@dataclass(frozen=True, kw_only=True)
class AdamSettings(MethodSettings):
    """Settings of Adam's rule, by the names that Hugging Face gives them in a config."""

    beta1: BelowOne = keyed(0.9, "adam_beta1")
    beta2: BelowOne = keyed(0.999, "adam_beta2")
    eps: Positive = keyed(1e-8, "adam_epsilon")


@cache
def kinds(cls: type) -> dict[str, object]:
    """The types of a dataclass's fields, by name; read once."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {each.name: hints[each.name] for each in fields(cls)}


def check_values(cls: type, given: Mapping[str, object], section: str) -> None:
    """UserError for a setting that there is not, is not of its type, or outside of its bounds."""
    known, others = kinds(cls), OTHERS | {each.metadata.get("key"): each.name for each in fields(cls)}
    for name, value in given.items():
        if name not in known:
            near = others.get(name) or "".join(get_close_matches(str(name), known, n=1))
            meant = near and f"; did you mean {near}?"
            raise UserError(f"settings: {section} has no {name}{meant}; it takes {', '.join(sorted(known))}")
        if not fits(value, known[name]):
            raise UserError(f"{section}.{name}: found {value!r}, expected {describe(known[name], full=True)}")


def checked_rate(lr: Any, name: str = "lr") -> float:
    """A learning rate as a float; UserError if it is none. One number in a tensor or an array is a rate too, as for
    torch's optimizers."""
    try:
        lr = lr.item()
    except (AttributeError, RuntimeError, ValueError):  # a number already, or several
        pass
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not math.isfinite(lr) or lr < 0:
        raise UserError(f"{name}: {lr!r} is no learning rate; a number of at least 0 is needed")
    return float(lr)
