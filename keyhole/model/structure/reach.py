"""Which parameters can be trained: those that a forward pass on tokens uses, but for those that a run freezes.

What a pass uses is found before weights are read and almost without arithmetic.

A published model may hold more than a language model: a vision tower, projectors, attention to an encoder. A batch of
tokens never uses these parts, so they cannot be trained; but a method that perturbs all weights would change them at
random. So the module's own forward is run once on a row of tokens, as soon as the module is built (skeleton.py), and
every parameter is recorded that an operation takes, or that belongs to a module that is called (PyTorch's recurrent
layers keep their own list of them). The others are marked and frozen.

At that time matrices are *constants*: one zero, expanded to a shape. An operation on a large constant is run on the
meta device, for its shape alone, and returns a constant of that shape; all other operations are executed. Constants are
ordinary tensors with known values, so code that reads values (masks, routers) runs too. A model of any size takes a few
megabytes, and about 0.1 ms per operation.

Unused experts are not marked: if one member of a list inside a block was used, the next batch may choose another one.

**`freeze`**: a parameter is frozen if one of these describes it:

    embeddings              the tables of tokens and positions, and the head over the vocabulary
    model.layers.0          a module: everything below it
    *.mlp.down_proj.*       a name with `*` for any characters, `?` for one, [0-9] for one of several

A tied parameter has several names, and is frozen by any of them. A frozen parameter has `requires_grad` False, as if
the user had called requires_grad_(False) on it: it has no gradient, no noise and no optimizer state, and the memory
plan counts none. It is marked, too: a layer whose weight is frozen by this setting gets no adapters, whereas users of
peft freeze a whole model before they add some.

For `zo` it also takes noise away: a step moves every trained weight at random (docs/methods.md, "Which weights zo
trains").
"""

import json
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from keyhole.errors import UserError
from keyhole.machine.held import alone

SHORT, LONG = 16, 512  # tokens in the row; some parts are used only by long rows
LARGE = 2**16  # values of constants with more elements than this are not computed
EMBEDDINGS = "embeddings"
WILD = "*?["
_tried: dict[tuple[type, str], "Tried"] = {}


@dataclass(frozen=True)
class Tried:
    """The result: names of parameters that are not used, and of modules that read a matrix of a submodule without
    calling it; a parameter that the forward changes. why: the reason if the forward could not be run."""

    unreached: frozenset[str] = frozenset()
    readers: frozenset[str] = frozenset()
    changed: str = ""
    why: str = ""


def mark_use(module: nn.Module) -> str:
    """Marks and freezes the parameters that no forward pass on tokens uses, and marks modules that read the matrices of
    submodules directly. If the forward could not be run, marks nothing and returns the reason."""
    key = type(module), config_text(module)
    if key not in _tried:
        _tried[key] = _try(module)
    found = _tried[key]
    if found.changed:
        raise UserError(
            f"model: the forward of {type(module).__name__} changes weights in place ({found.changed}), so it would do "
            'that once per pass. Switch it off in its config.json (RWKV: "rescale_every": 0)'
        )
    param: Any  # gets attributes
    for name, param in module.named_parameters():
        if name in found.unreached:
            param.keyhole_unreached = True
            param.requires_grad_(False)
    for name in found.readers:
        reader: Any = module.get_submodule(name)
        reader.keyhole_reads_inside = True
    return found.why


def config_text(module: Any) -> str:
    """A module's config, whatever directory it was read from."""
    return json.dumps(module.config.to_dict() | {"_name_or_path": ""}, sort_keys=True, default=str)


def _try(module: nn.Module) -> Tried:
    """Runs a short row, and a long one if the short one does not use everything: loops over tokens are slow."""
    watch = _Watch(module)
    if why := watch.forward(SHORT):
        return Tried(why=why)
    if next(_never_reached(module, watch.reached), None) is not None:
        watch.forward(LONG)  # if it fails, what was recorded until then still counts
    never = {id(param) for param in _never_reached(module, watch.reached)}
    return Tried(
        frozenset(name for name, param in module.named_parameters() if id(param) in never),
        frozenset(name for name, part in module.named_modules() if id(part) in watch.readers),
        next((name for name, param in module.named_parameters() if id(param) in watch.changed), ""),
    )


class _Enough(Exception):
    """The arguments are known."""


def call_of(module: nn.Module, part: nn.Module, length: int) -> tuple[tuple, dict[str, object]] | None:
    """The arguments with which the module's forward calls one of its parts, for a row of this many tokens; large ones
    are constants. None if the forward does not get that far."""
    found: list[tuple[tuple, dict[str, object]]] = []

    def take(part: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        found.append((args, kwargs))
        raise _Enough

    with part.register_forward_pre_hook(take, with_kwargs=True):
        _Watch(module).forward(length)
    return found[0] if found else None


def is_matrix(p: nn.Parameter) -> bool:
    """Neither a vector nor the kernel of a depthwise convolution [C, 1, K], which is small, and which state-space
    layers read without calling the module that owns it."""
    return p.ndim > 1 and p.shape[-2] > 1


def reads_inside(part: nn.Module) -> bool:
    """Whether this module reads a matrix of a submodule without calling it."""
    return bool(vars(part).get("keyhole_reads_inside"))


def is_unreached(param: nn.Parameter) -> bool:
    """Whether no forward pass on tokens uses this parameter."""
    return bool(vars(param).get("keyhole_unreached"))


def _never_reached(module: nn.Module, reached: set[int]) -> Iterator[nn.Parameter]:
    """Parameters of parts of which none was used, unless the part is an expert."""

    def walk(part: nn.Module, inside_list: bool) -> Iterator[nn.Parameter]:
        yield from (p for p in part._parameters.values() if p is not None and id(p) not in reached)
        is_list = isinstance(part, nn.ModuleList)
        for child in part.children():
            if any(id(p) in reached for p in child.parameters()):
                yield from walk(child, inside_list or is_list)
            elif not (is_list and inside_list):
                yield from child.parameters()

    return walk(module, False)


def _is_large_constant(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.numel() > LARGE and not any(x.stride())


class _Watch(TorchDispatchMode):
    """Records which parameters are read and by which modules. Operations on large constants return constants; their
    values are not computed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module
        self.reached: set[int] = set()  # ids of parameters
        self.readers: set[int] = set()  # ids of modules that read a matrix of a submodule without calling it
        self.changed: set[int] = set()  # ids of parameters
        self.owners: dict[int, list[nn.Module]] = {}  # of each parameter; a tied one has two
        for part in module.modules():
            for param in (p for p in part._parameters.values() if p is not None and is_matrix(p)):
                self.owners.setdefault(id(param), []).append(part)
        self.entered: list[nn.Module] = []

    def forward(self, length: int) -> str:
        """Runs the module on a row of tokens; returns the reason if it failed."""
        ids = torch.arange(length)[None] % min(64, self.module.get_input_embeddings().weight.shape[0])
        self.entered, self.thread = [], threading.get_ident()
        takes = signature(self.module.forward).parameters
        has_cache = "use_cache" in takes or any(one.kind == one.VAR_KEYWORD for one in takes.values())
        without_cache = {"use_cache": False} if has_cache else {}
        try:
            with (
                alone(),
                torch.no_grad(),
                warnings.catch_warnings(),
                register_module_forward_pre_hook(self._enter),  # knows which modules are being called
                register_module_forward_hook(self._leave),
                self,
            ):
                warnings.simplefilter("ignore")  # a small model's products are computed, in any dtype
                self.module(input_ids=ids, **without_cache)
        except Exception as error:  # raised by the family's own code
            return " ".join(str(error).split())[:120] or type(error).__name__
        return ""

    def _enter(self, part: nn.Module, args: tuple) -> None:
        if threading.get_ident() != self.thread:  # a module of the caller's: these hooks are called for all
            return
        self.entered.append(part)
        self.reached.update(id(param) for param in part._parameters.values() if param is not None)

    def _leave(self, part: nn.Module, args: tuple, output: object) -> None:
        if threading.get_ident() == self.thread:
            self.entered.pop()

    def _note_use(self, param: nn.Parameter) -> None:
        self.reached.add(id(param))
        owners = self.owners.get(id(param), [])
        if owners and not any(part is owner for part in self.entered for owner in owners):
            around = (part for part in reversed(self.entered) if owners[0] in set(part.modules()))
            self.readers.update(id(part) for part in islice(around, 1))

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        leaves, is_mutable = tree_leaves((args, kwargs)), func._schema.is_mutable
        for x in leaves:
            if isinstance(x, nn.Parameter):
                self._note_use(x)
        if is_mutable and isinstance(args[0], nn.Parameter):
            self.changed.add(id(args[0]))
        if not any(_is_large_constant(x) for x in leaves):
            try:
                return func(*args, **kwargs)
            except RuntimeError:  # the operation needs separate memory for every element
                if is_mutable:
                    return args[0]
                return func(*tree_map(_materialised, args), **tree_map(_materialised, kwargs))
        if is_mutable:
            return args[0]
        if func.is_view:
            try:
                return func(*args, **kwargs)
            except RuntimeError:  # a view that constants do not support (as complex numbers)
                pass
        shapes = _on_meta(func, args, kwargs)
        return func(*args, **kwargs) if shapes is None else tree_map(_constant, shapes)


def _on_meta(func: OpOverload, args: tuple, kwargs: dict[str, object]) -> Any:
    """The output on the meta device; None if its shape depends on values."""
    for dtype in (None, torch.bfloat16):  # grouped products require bfloat16
        try:
            convert = partial(_to_meta, dtype=dtype)
            return func(*tree_map(convert, args), **tree_map(convert, kwargs))
        except (RuntimeError, NotImplementedError):
            continue
    return None


def _materialised(x: object) -> object:
    return x.contiguous() if isinstance(x, torch.Tensor) else x


def _to_meta(x: object, dtype: torch.dtype | None) -> object:
    if isinstance(x, torch.Tensor):
        return torch.empty(x.shape, dtype=dtype if dtype and x.is_floating_point() else x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def _constant(x: object) -> object:
    if not isinstance(x, torch.Tensor) or x.device.type != "meta":
        return x
    zero = torch.zeros((), dtype=x.dtype)
    return zero.expand(x.shape) if x.numel() > LARGE else zero.repeat(x.shape)


# -- what is frozen ----------------------------------------------------------------------------------------------------


def freeze(module: nn.Module, described: str | Sequence[str] | None) -> None:
    """Freezes the parameters so described; UserError for a description that fits none, or if none would be trained."""
    if described is None:
        return
    texts = [described] if isinstance(described, str) else described
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"freeze: found {described!r:.60}, expected text, such as {EMBEDDINGS!r}, or a list of texts")
    for text in texts:
        found = list(_of_text(module, text))
        if not found:
            raise UserError(f"freeze: no parameter of {type(module).__name__} is called {text!r}{_meant(module, text)}")
        param: Any  # gets an attribute
        for param in found:
            param.requires_grad_(False)
            param.keyhole_frozen = True
    if not any(param.requires_grad for param in module.parameters()):
        raise UserError("freeze: every parameter is frozen, so there is nothing to train; freeze fewer")


@contextmanager
def frozen_as(module: nn.Module, described: str | Sequence[str] | None) -> Iterator[None]:
    """A context in which these parameters are frozen, and none that `freeze` was told before; afterwards as before."""
    before = [(param, param.requires_grad, is_left_out(param)) for param in module.parameters()]
    try:
        for param, _, left_out in before:
            param.requires_grad_(param.requires_grad or left_out)
        freeze(module, described)
        yield
    finally:
        one: Any
        for one, trained, left_out in before:
            one.requires_grad_(trained)
            one.keyhole_frozen = left_out


def is_left_out(param: nn.Parameter) -> bool:
    """Whether `freeze` describes this parameter."""
    return bool(vars(param).get("keyhole_frozen"))


def _of_text(module: nn.Module, text: str) -> Iterator[nn.Parameter]:
    if text == EMBEDDINGS:
        yield from _embeddings(module)
        return
    for name, param in module.named_parameters(remove_duplicate=False):
        if name == text or name.startswith(f"{text}.") or (any(c in text for c in WILD) and fnmatchcase(name, text)):
            yield param


def _embeddings(module: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of every embedding table, and of the head over the vocabulary (not of a classifier's head)."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            yield from part.parameters()
    model: Any = module  # a class of Transformers
    head = model.get_output_embeddings()
    if head is not None:
        yield from head.parameters()


def _meant(module: nn.Module, text: str) -> str:
    """The names most like it, or how names look."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    owners = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    known = [*names, *sorted(owners), EMBEDDINGS]
    close = get_close_matches(text, known, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else f"; names are such as {names[-1]}, or {EMBEDDINGS}"
