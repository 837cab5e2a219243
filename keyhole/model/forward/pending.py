"""Outputs of linear layers that lack their small part until something reads them.

    y = x W^T + p B_l^T + b_l        p = x V: a layer with low-rank factors (low_rank.py)

The small part costs one write and one read of y, if it is made first and the product is added to it. Where an addition
to the residual stream or a ReLU reads y, its kernel can add the small part on the way (ops/lowrank/correct.py,
relu.py). But the model's code decides what reads y. So the layer returns a `Pending`: a tensor to all code, which knows
what its numbers lack. It looks at every PyTorch function that it is given to:

    shape, dtype, device, ..                     answered; nothing is computed
    view, reshape that keep the last dimension   a Pending of the same memory
    dropout that does nothing                    the same Pending
    + a tensor of the same shape                 one kernel: residual + y + p B_l^T + b_l
    the ReLU of a pair (sketches.py)             one kernel: max(y + p B_l^T + b_l, 0)
    anything else, and + of other things         the small part is first added in place, once (`finished`)

Results are plain tensors, with the same bits in all cases: all kernels round y + p B_l^T + b_l before they go on. So a
hook that looks at y changes no number, and a layer whose output is used in another way costs what it would cost
otherwise: y is written and read once more.

A Pending has no memory of its own, so code that goes past PyTorch's functions to the bytes of a tensor (a C++
extension) raises an error, instead of computing with wrong numbers. Its `data_ptr()` is that of y, after y was
finished.

B_l and b_l are those of a running pass, and change after it. So what is still alive when a block's forward returns (a
hook has kept it) is finished there, and a block's own output is never a Pending. Outside of a block's forward nothing
waits; nor with gradients, in inference mode (whose tensors cannot be written elsewhere), or in compiled code.
Legend: L looks, M rows of all looks together, O outputs, r rank.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from keyhole import ops
from keyhole.ops.lowrank.correct import Small

Tensor = torch.Tensor
_PROPERTIES = "shape dtype device layout ndim itemsize nbytes requires_grad is_leaf grad grad_fn _version".split()
_PROPERTIES += "is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_mps is_xpu".split()
_METHODS = "size dim ndimension numel nelement stride storage_offset is_contiguous element_size get_device".split()
_METHODS += "is_floating_point is_complex is_signed is_inference __len__".split()
METADATA = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {getattr(Tensor, name) for name in _METHODS}
METADATA |= {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_inference}
VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}
SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
NO_MEMORY = (
    "If the tensor is the output y of a linear layer: with zo.rank it lacks a part until a PyTorch function reads it, "
    "and this code reads its memory. Give it y.contiguous()"
)
DROPOUTS = {F.dropout: ("input", "p", "training"), torch.dropout: ("input", "p", "train")}


class _Product:
    """x W^T of a layer, and what it lacks; None: nothing. All views of it share this object."""

    __slots__ = ("y_MO", "lacks", "__weakref__")

    def __init__(self, y_MO: Tensor, lacks: Small) -> None:
        self.y_MO = y_MO
        self.lacks: Small | None = lacks

    def finish(self) -> None:
        if self.lacks is not None:
            lacks, self.lacks = self.lacks, None
            with torch.no_grad(), _outside() if _traced() else nullcontext():
                ops.correct(self.y_MO, *lacks, out=self.y_MO)


def _traced() -> bool:
    """Whether the running code is transformed (torch.func: vmap, grad, jvp) or recorded (make_fx). Its tensors may have
    no memory, it must not write to those that it did not make, and what it computes may be computed again."""
    recorder = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return torch._C._functorch.peek_interpreter_stack() is not None or recorder is not None


@contextmanager
def _outside() -> Iterator[None]:
    """A context that no transformation sees."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


class Pending(torch.Tensor):
    """A view of a product. (Its attributes must not have the names of a tensor's.)"""

    keyhole_product: _Product
    keyhole_view: Tensor

    @staticmethod
    def __new__(cls, product: _Product, view: Tensor) -> "Pending":
        like: dict[str, Any] = {"strides": view.stride(), "dtype": view.dtype, "device": view.device}
        made: Any = Tensor._make_wrapper_subclass(cls, view.shape, **like)
        made.keyhole_product, made.keyhole_view = product, view
        torch._C._set_throw_on_mutable_data_ptr(made)  # otherwise C++ code is given a null pointer
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*map(_as_it_is, args), **{name: _as_it_is(value) for name, value in kwargs.items()})
        if func in SUMS and (made := _sum(args, kwargs)) is not None:
            return made
        if func in DROPOUTS and _does_nothing(given := dict(zip(DROPOUTS[func], args, strict=False)) | kwargs):
            return given["input"]
        if func in VIEWS and args and isinstance(args[0], Pending):
            return _view(args[0], func(_as_it_is(args[0]), *args[1:], **kwargs))
        return func(*finished(args), **finished(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What C++ code calls, which does not ask `__torch_function__`."""
        return func(*finished(args), **finished(kwargs or {}))


def _as_it_is(value: Any) -> Any:
    return value.keyhole_view if isinstance(value, Pending) else value


def _view(before: Pending, view: Tensor) -> Tensor:
    y, product = before.keyhole_view, before.keyhole_product
    keeps_rows = view.dim() and view.shape[-1] == y.shape[-1] and view.dtype == y.dtype and view.is_contiguous()
    if keeps_rows and product.lacks is not None:
        return Pending(product, view)
    product.finish()
    return view


def _does_nothing(given: dict[str, Any]) -> bool:
    """given: the arguments of a dropout."""
    trains = given.get("training", given.get("train", True))
    return isinstance(given.get("input"), Pending) and (trains is False or given.get("p") == 0)


def _sum(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The sum of a Pending and another tensor in one kernel; None: this is something else."""
    if len(args) != 2 or kwargs or torch.is_grad_enabled() or _traced():
        return None
    mine, other = args if isinstance(args[0], Pending) else args[::-1]
    other, product, y = finished(other), mine.keyhole_product, mine.keyhole_view
    if product.lacks is None or type(other) not in (Tensor, nn.Parameter) or not other.is_contiguous():
        return None
    if (other.shape, other.dtype, other.device) != (y.shape, y.dtype, y.device):
        return None
    lacks: Small = product.lacks
    return ops.correct(product.y_MO, *lacks, other.view(product.y_MO.shape)).view(y.shape)


def finished(value: Any) -> Any:
    """The value with every Pending in it finished, and replaced by its plain tensor: by itself, or in tuples, lists and
    dicts (which are changed in place)."""
    if isinstance(value, Pending):
        value.keyhole_product.finish()
        return value.keyhole_view
    if isinstance(value, dict):
        for name, part in value.items():
            if (new := finished(part)) is not part:
                value[name] = new
        return value
    if not isinstance(value, tuple | list):
        return value
    parts = [finished(part) for part in value]
    if all(new is part for new, part in zip(parts, value, strict=True)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def rows_and_lack(x: Tensor) -> tuple[Tensor, Small | None]:
    """[M, O] contiguous rows of x, and what they lack."""
    if isinstance(x, Pending) and (product := x.keyhole_product).lacks is not None:
        return product.y_MO, product.lacks
    x = finished(x)
    return x.reshape(-1, x.shape[-1]).contiguous(), None


# -- blocks ------------------------------------------------------------------------------------------------------------


class _Open(threading.local):
    """Per thread: for each block whose forward is running, the products in it that waited."""

    def __init__(self) -> None:
        self.blocks: list[list[weakref.ref[_Product]]] = []


_open = _Open()


def may_wait() -> bool:
    """Whether a product may lack something here."""
    other_mode = torch.is_grad_enabled() or torch.is_inference_mode_enabled() or torch.compiler.is_compiling()
    return bool(_open.blocks) and not other_mode


def wait(y_MO: Tensor, lacks: Small, shape: tuple[int, ...]) -> Pending:
    """A contiguous product that lacks p B_l^T + b_l, in this shape."""
    product = _Product(y_MO, lacks)
    _open.blocks[-1].append(weakref.ref(product))
    return Pending(product, y_MO.view(shape))


def install_ends(model: Any, blocks: list[nn.Module]) -> None:
    """Makes these blocks finish at their end what has waited in them. Once per model and block. Within CUDA graphs of
    blocks (graphs.py), so that it is captured."""
    for i, block in enumerate(blocks):
        if (key := ("end", id(block))) not in model.factored:
            model.factored.add(key)
            if model.graphs is None:
                model.patches.forward(block, _forward(block.forward))
            else:
                model.graphs.ordinary[i] = _forward(model.graphs.ordinary[i])


def _forward(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return ordinary(*args, **kwargs)
        made: list[weakref.ref[_Product]] = []
        _open.blocks.append(made)
        try:
            output = finished(ordinary(*args, **kwargs))
            _finish(made)
            return output
        except BaseException as error:
            if "access data pointer" in str(error):
                error.add_note(NO_MEMORY)
            with suppress(Exception):  # the device may be what failed
                _finish(made)
            raise
        finally:
            _open.blocks.pop()

    return forward


def _finish(made: list[weakref.ref[_Product]]) -> None:
    for one in made:
        if (product := one()) is not None:
            product.finish()
