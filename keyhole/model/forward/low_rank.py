"""Linear layers with low-rank factors beside their weight, in several versions within one pass.

    y = x W^T + (x V) B_l^T + b_l        for the rows of look l = 1 .. L, one below the other (ops/lowrank/product.py)

A *look* is one perturbed version of the weights, at which a zeroth-order step evaluates its loss. A method that trains
low-rank factors (methods/zo/low_rank/) sets them as `methods.low_rank` of the model. Each layer then asks this object
what to add, in every pass: of a step, an evaluation or a generation. Without factors, and with gradients, the layer's
previous forward is called. x W^T is the model's own product, with the weights that are currently bound: a slot, a home,
a tile of rows (pieces.py).

Other modules use their parameters directly, and one pass carries the rows of several looks. So a module with vectors
(a norm, learned positions) is called once per look, with the rows and the parameters of that look, and the results are
concatenated. The first dimension of every tensor is ordered look by look; if a module sees another shape, such passes
cannot run it (`NotByRows`).

Blocks before the first trained weight see the same rows for all looks: they run with those of one look, and their
output is repeated. With the lower 10 of 30 blocks and the embedding frozen, and two looks, 5 / 6 of the products. What
comes before is seen in each pass: rows of looks begin to differ (`LowRank.differ`) where rows of a trained embedding
are looked up, at a module outside of the blocks whose vectors are trained, and at a block in which something is
trained.
Rows are the first dimension of a block's arguments. A tensor could have as many entries there for another reason, so
when arguments of new shapes come, their parts for the looks are compared; if these are not the same numbers, or an
argument is something else than tensors, plain values, and tuples of these, such blocks run with all rows. While a graph
is captured nothing can be compared: a recording is compared with a pass that was not recorded before it is used.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn

from keyhole import ops
from keyhole.machine.gpu import accelerator
from keyhole.model.forward.pieces import RowTiles
from keyhole.model.recorder import signature_of, tensors_of
from keyhole.model.structure.layout import FlatTensor

Forward = Callable[..., Any]


class NotByRows(Exception):
    """A module mixes or permutes rows, or its shapes do not show that it keeps them apart."""


@dataclass(frozen=True)
class Added:
    """What a layer's product adds. earlier: (a, v) that all looks share; transposed: the weight is stored as [I, O]."""

    v_rI: torch.Tensor
    b_LrO: torch.Tensor
    bias_LO: torch.Tensor | None
    earlier: tuple[torch.Tensor, torch.Tensor] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Share:
    """The looks that a pass carries, [first, first + count), and its total number of rows and tokens."""

    first: int
    count: int
    rows: int = 0
    tokens: int = 0

    def check(self, x: torch.Tensor) -> None:
        """Refuses an input whose first dimension is neither all rows nor all tokens, in order."""
        lead = x.shape[:-1]
        by_rows = lead[0] in (self.rows, self.tokens) or (lead[0] == 1 and len(lead) == 2)
        if lead.numel() != self.tokens or not by_rows:
            raise NotByRows(f"an input of {tuple(x.shape)} for {self.rows} rows and {self.tokens} tokens")

    def rows_of(self, look: int, value: object) -> Any:
        """The rows of a look; a value without rows is the same for all looks."""
        if isinstance(value, tuple):
            return type(value)(self.rows_of(look, part) for part in value)
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] not in (self.rows, self.tokens):
            return value
        size = value.shape[0] // self.count
        return value[look * size : (look + 1) * size]


class LowRank(Protocol):
    """What the layers of a model ask the method that trains low-rank factors beside their weights (it is a subclass),
    and the looks that the passes carry."""

    model: Any
    trained_blocks: set[int]  # ids of the blocks in which something is trained
    share: Share | None = None  # of passes outside of a step; None: the weights without perturbation
    shares: dict[int, Share]  # by pass, during a step
    differ: set[int]  # passes whose looks have different rows by now
    commons: torch.Tensor | None = None  # of all looks, during a step

    @contextmanager
    def carried(self, shares: dict[int, Share], commons: torch.Tensor) -> Iterator[None]:
        """A context in which passes carry looks. commons: [looks, common]."""
        self.differ, self.shares, self.commons = set(), shares, commons  # of no numbers, if there is no final norm
        try:
            yield
        finally:
            self.shares, self.commons = {}, None

    @contextmanager
    def seen_at(self, look: int) -> Iterator[None]:
        """A context in which every pass uses the weights at one look."""
        self.share = Share(look, 1)
        try:
            yield
        finally:
            self.share = None

    @property
    def current(self) -> int:
        """The number of the running pass."""
        return int(self.model.conductor.current.index)

    @property
    def running(self) -> Share | None:
        """The share of the running pass; None: the pass uses the weights without perturbation."""
        return self.shares[self.current] if self.shares else self.share

    @contextmanager
    def one_look(self) -> Iterator[None]:
        """A context in which the running pass carries the rows of its first look only."""
        index, share = self.current, self.shares[self.current]
        self.shares[index] = Share(share.first, 1, share.rows // share.count, share.tokens // share.count)
        try:
            yield
        finally:
            self.shares[index] = share

    def point(self, module: nn.Module, look: int | None, several: bool) -> None:
        """Points the module's own vectors to those of a look; several: the pass carries more than one look."""

    def graph_key(self) -> tuple[Share | int | None, ...] | None:
        """Equal for passes whose factors are at the same addresses; None: the addresses change."""

    def added_to(self, layer: nn.Module, x: torch.Tensor) -> Added | None:
        """What the layer adds to its product of x; None: nothing."""

    def as_saved(self, tensor: FlatTensor, home: torch.Tensor, merged: bool = True) -> torch.Tensor:
        """A parameter with its factors merged; merged=False: a matrix as it is at home."""

    def sample(self, tensor: FlatTensor) -> torch.Tensor | None:
        """What is trained beside a parameter's home; None: nothing."""

    def settle(self) -> None:
        """Merges everything that was trained into the weights at home, because another method will train them."""


def ask(model: Any, module: nn.Module, run: Forward) -> None:
    """Replaces the module's forward by `run`, which is given the factors, while there are any and no gradients. Once
    per model and module."""
    model_of, ordinary = weakref.ref(model), module.forward

    def forward(*args: object, **kwargs: object) -> Any:
        owner = model_of()
        if owner is None or owner.methods.low_rank is None or torch.is_grad_enabled():
            return ordinary(*args, **kwargs)
        return run(owner.methods.low_rank, ordinary, *args, **kwargs)

    if id(module) not in model.factored:
        model.factored.add(id(module))
        model.patches.forward(module, forward)


# -- linear layers -----------------------------------------------------------------------------------------------------


def with_factors(layer: nn.Module, tiles: RowTiles | None) -> Forward:
    """The forward of a linear layer that adds the model's factors."""
    layer_of = cast(Callable[[], nn.Module], weakref.ref(layer))

    def run(factors: LowRank, ordinary: Forward, x: torch.Tensor) -> torch.Tensor:
        if (added := factors.added_to(layer_of(), x)) is None:
            return ordinary(x)
        if (share := factors.running) is not None and share.count > 1:
            share.check(x)
        if torch.is_autocast_enabled(x.device.type):  # computed in the model's dtype, returned in that of the region
            y = product(x.to(added.v_rI.dtype), layer_of(), added, tiles)
            return y.to(torch.get_autocast_dtype(x.device.type))
        return product(x, layer_of(), added, tiles)

    return run


def product(x: torch.Tensor, layer: Any, added: Added, tiles: RowTiles | None = None) -> torch.Tensor:
    """The layer's output, with its factors added."""
    looks, _, outputs = added.b_LrO.shape
    x_MI = x.reshape(-1, x.shape[-1]).contiguous()
    p_LMr = ops.narrow(x_MI, added.v_rI).unflatten(0, (looks, -1))
    y_MO = ops.widen(p_LMr, added.b_LrO, added.bias_LO, x.dtype).view(-1, outputs)
    if added.earlier is not None:
        a_kO, v_kI = added.earlier
        y_MO.addmm_(x_MI @ v_kI.t(), a_kO)
    if tiles is None:
        y_MO.addmm_(x_MI, layer.weight if added.transposed else layer.weight.t())
    else:
        for i, (first, last) in enumerate(tiles.rows):
            y_MO[:, first:last].addmm_(x_MI, tiles.weight(i).t())
    return y_MO.view(*x.shape[:-1], outputs)


# -- modules with vectors ----------------------------------------------------------------------------------------------


def by_look(module: nn.Module) -> Forward:
    """The forward of a module that owns vectors: it uses those of each look of a pass, one look after the other."""
    module_of = cast(Callable[[], nn.Module], weakref.ref(module))

    def run(factors: LowRank, ordinary: Forward, *args: object, **kwargs: object) -> Any:
        share = factors.running
        if share is None or share.count == 1:
            factors.point(module_of(), None if share is None else share.first, several=False)
            return ordinary(*args, **kwargs)
        if any(p.requires_grad for p in module_of()._parameters.values() if p is not None):
            factors.differ.add(factors.current)
        outputs = []
        for look in range(share.count):
            factors.point(module_of(), share.first + look, several=True)
            own = {name: share.rows_of(look, value) for name, value in kwargs.items()}
            outputs.append(ordinary(*(share.rows_of(look, value) for value in args), **own))
        return _together(outputs, share)

    return run


def _together(outputs: list[Any], share: Share) -> torch.Tensor:
    first = outputs[0]
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        raise NotByRows(f"a {type(first).__name__} as output")
    if first.shape[0] * share.count not in (share.rows, share.tokens):
        if first.shape[0] != 1:
            raise NotByRows(f"an output of {tuple(first.shape)} for {share.rows} rows")
        outputs = [one.expand(share.rows // share.count, *one.shape[1:]) for one in outputs]  # the same for all rows
    return torch.cat(outputs)


# -- blocks before the first trained weight ----------------------------------------------------------------------------


def once(block: int, same: dict[tuple, bool]) -> Forward:
    """The forward of a block that runs once for all looks, if it is before the first trained weight. same: by the
    shapes of arguments, whether their parts for the looks are the same."""

    def run(factors: LowRank, ordinary: Forward, *args: object, **kwargs: object) -> Any:
        share = factors.running
        if share is None or share.count == 1:
            return ordinary(*args, **kwargs)
        if block in factors.trained_blocks:
            factors.differ.add(factors.current)
        if factors.current in factors.differ or not _alike((*args, *kwargs.values()), share, same):
            return ordinary(*args, **kwargs)
        with factors.one_look():
            own = {name: share.rows_of(0, x) for name, x in kwargs.items()}
            output = ordinary(*(share.rows_of(0, x) for x in args), **own)
        return _repeated(output, share.rows // share.count, share.count)

    return run


def _alike(values: tuple, share: Share, same: dict[tuple, bool]) -> bool:
    """Whether these arguments are the same for all looks. Reads the device once per combination of shapes."""
    if not isinstance(values[0], torch.Tensor) or values[0].dim() == 0 or values[0].shape[0] != share.rows:
        return False
    signature = None if any(isinstance(x, dict | list) for x in _inside(values)) else signature_of(values)
    if signature is None:
        return False
    key = signature, share.count
    if key not in same:
        if accelerator.is_available() and accelerator.is_current_stream_capturing():
            return all(same.values())
        tensors = [x for x in tensors_of(values) if x.dim() and x.shape[0] % share.rows == 0]
        same[key] = all(x.shape[0] == share.rows for x in tensors) and all(
            torch.equal(first, other) for first, *others in (x.chunk(share.count) for x in tensors) for other in others
        )
    return same[key]


def _inside(value: object) -> list[object]:
    """The value, and everything in the tuples that it consists of."""
    return [value, *(part for one in value for part in _inside(one))] if isinstance(value, tuple) else [value]


def _repeated(output: object, rows: int, count: int) -> object:
    """An output for the rows of all looks."""
    if isinstance(output, tuple):
        return type(output)(_repeated(part, rows, count) for part in output)
    if isinstance(output, torch.Tensor) and output.dim() > 0 and output.shape[0] == rows:
        return output.repeat(count, *[1] * (output.dim() - 1))
    return output
