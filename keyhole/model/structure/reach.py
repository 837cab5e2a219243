"""Which parameters a forward on tokens reaches, found before a weight is read and almost without arithmetic.

A published model may hold more than a language model: a vision tower, projectors, attention to an encoder. A batch of
tokens never gets there, so nothing can be learned there; but a method that perturbs all weights would change them at
random. So the module's own forward is run once on a row of tokens, as soon as the module is built (skeleton.py), and
every parameter that it fetches is noted. The others are marked and frozen.

At that time matrices are *constants*: one zero, expanded to a shape. An operation on a large constant is run on the
meta device, for its shape alone, and gives a constant of that shape; all others are run as they are. Constants are
ordinary tensors with known values, so code that looks at values (masks, routers) runs too. A model of any size takes a
few megabytes, and about 0.1 ms per operation.

Experts are the exception: a member of a list inside a block is not marked where another member was reached, since the
next batch may choose it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

LENGTHS = (512, 32)  # of the row, in tokens: some parts are used only from a length on, some models end before
LARGE = 2**16  # elements of a constant whose values are not computed
_tried: dict[tuple[type, str], tuple[str, frozenset[str]]] = {}


def freeze_unreached(module: nn.Module) -> str:
    """Marks and freezes the parameters that no forward on tokens reaches. Returns why the forward could not be run, if
    it could not: then none is marked."""
    key = type(module), module.config.to_json_string(use_diff=False)
    if key not in _tried:
        _tried[key] = _try(module)
    why, unreached = _tried[key]
    for name, param in module.named_parameters():
        if name in unreached:
            param.keyhole_unreached = True
            param.requires_grad_(False)
    return why


def _try(module: nn.Module) -> tuple[str, frozenset[str]]:
    """Why no forward can be run, and the names of what it does not reach."""
    vocabulary, why = module.get_input_embeddings().weight.shape[0], ""
    for length in LENGTHS:
        reached: set[int] = set()
        try:
            with torch.no_grad(), _noting_fetches(reached), _ShapesOfLarge():
                module(input_ids=torch.arange(length)[None] % min(64, vocabulary), use_cache=False)
        except Exception as error:  # the family's own code
            why = " ".join(str(error).split())[:120] or type(error).__name__
            continue
        never = {id(param) for param in _never_reached(module, reached)}
        return "", frozenset(name for name, param in module.named_parameters() if id(param) in never)
    return why, frozenset()


def is_unreached(param: nn.Parameter) -> bool:
    """Whether no forward on tokens uses this parameter."""
    return getattr(param, "keyhole_unreached", False)


def _never_reached(module: nn.Module, reached: set[int]) -> Iterator[nn.Parameter]:
    """Parameters of parts without one that was reached, unless the part is an expert."""

    def any_reached(part: nn.Module) -> bool:
        return any(id(p) in reached for p in part.parameters())

    def walk(part: nn.Module, inside_list: bool) -> Iterator[nn.Parameter]:
        yield from (p for p in part._parameters.values() if p is not None and id(p) not in reached)
        is_list = isinstance(part, nn.ModuleList)
        for child in part.children():
            if any_reached(child):
                yield from walk(child, inside_list or is_list)
            elif not (is_list and inside_list):
                yield from child.parameters()

    return walk(module, False)


@contextmanager
def _noting_fetches(reached: set[int]) -> Iterator[None]:
    """A context in which the ids of all parameters that are fetched from a module, or owned by one that is entered (a
    recurrent layer of PyTorch has its own list of them), go into `reached`."""
    fetch = nn.Module.__getattr__

    def note(module: nn.Module, name: str) -> Any:
        value = fetch(module, name)
        if isinstance(value, nn.Parameter):
            reached.add(id(value))
        return value

    def enter(module: nn.Module, args: tuple) -> None:
        reached.update(id(p) for p in module._parameters.values() if p is not None)

    hook = nn.modules.module.register_module_forward_pre_hook(enter)
    nn.Module.__getattr__ = note
    try:
        yield
    finally:
        nn.Module.__getattr__ = fetch
        hook.remove()


def _is_large_constant(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.numel() > LARGE and not any(x.stride())


class _ShapesOfLarge(TorchDispatchMode):
    """Operations on large constants give constants; no value is computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        is_mutable = func._schema.is_mutable
        if not any(_is_large_constant(x) for x in tree_leaves((args, kwargs))):
            try:
                return func(*args, **kwargs)
            except RuntimeError:  # it wants memory of its own for every element
                if is_mutable:
                    return args[0]
                return func(*tree_map(_materialised, args), **tree_map(_materialised, kwargs))
        if is_mutable:
            return args[0]
        if func.is_view:
            try:
                return func(*args, **kwargs)
            except RuntimeError:  # a view that constants do not have (as complex numbers)
                pass
        for dtype in (None, torch.bfloat16):  # grouped products want it
            try:
                convert = partial(_to_meta, dtype=dtype)
                return tree_map(_constant, func(*tree_map(convert, args), **tree_map(convert, kwargs)))
            except (RuntimeError, NotImplementedError):
                continue
        return func(*args, **kwargs)  # its shape depends on values


def _materialised(x: Any) -> Any:
    return x.contiguous() if isinstance(x, torch.Tensor) else x


def _to_meta(x: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty(x.shape, dtype=dtype if dtype and x.is_floating_point() else x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def _constant(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or x.device.type != "meta":
        return x
    zero = torch.zeros((), dtype=x.dtype)
    return zero.expand(x.shape) if x.numel() > LARGE else zero.repeat(x.shape)
