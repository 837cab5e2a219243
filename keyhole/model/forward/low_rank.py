"""Linear layers with low-rank factors beside their weight, in several versions within one pass.

    y = x W^T + (x V) B_l^T + b_l        for the rows of look l = 1 .. L, one below the other (ops/lowrank/product.py)

A *look* is one perturbed version of the weights, at which a zeroth-order step evaluates its loss. A method that trains
low-rank factors (methods/zo/low_rank/) sets them as `Model.low_rank`. The forward of each layer then asks this object
what to add, in every pass: of a step, an evaluation or a generation. Without factors, and with gradients, the layer's
previous forward is called.

x W^T is the model's own product, with the weights that are currently bound: a slot, a home, a tile of rows
(row_tiles.py). Where an addition to the residual stream or a ReLU reads y, its kernel adds the rest (pending.py).

Modules other than linear layers use their parameters directly, and one pass carries the rows of several looks. So a
module with vectors (learned positions, an odd norm) is called once per look, with the rows and the parameters of that
look, and the results are concatenated. Norms whose formula is known (norms.py) are one kernel for all looks
(ops/lowrank/norm.py). The first dimension of every tensor is ordered look by look; if a module sees another shape, such
passes cannot run it (`NotByRows`).
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from keyhole import ops
from keyhole.model.forward import pending
from keyhole.model.forward.norms import Known, find_norm
from keyhole.model.forward.row_tiles import RowTiles
from keyhole.model.forward.sketches import Readers, sketch, sketching_relu
from keyhole.model.structure.layout import FlatTensor

Forward = Callable[..., Any]


class NotByRows(Exception):
    """A module mixes or permutes rows, or its shapes do not show that it keeps them apart."""


@dataclass(frozen=True)
class Added:
    """What a layer's product adds. earlier: (a, v) that all looks share; transposed: the weight is stored as [I, O];
    readers: other layers that may read the same input; waits: what reads the output adds the rest (pending.py)."""

    v_rI: torch.Tensor
    b_LrO: torch.Tensor
    bias_LO: torch.Tensor | None
    earlier: tuple[torch.Tensor, torch.Tensor] | None = None
    transposed: bool = False
    readers: Readers | None = None
    waits: bool = False


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


class LowRank(Protocol):
    """What the layers of a model need from the method that trains low-rank factors beside their weights."""

    trained_blocks: set[int]  # ids of the blocks in which something is trained

    @property
    def running(self) -> Share | None:
        """The share of the running pass; None: the pass uses the weights without perturbation."""

    @property
    def parted(self) -> bool:
        """Whether the looks of the running pass have different rows by now (frozen_start.py)."""

    def part(self) -> None:
        """The looks of the running pass have different rows from here on."""

    def one_look(self) -> AbstractContextManager[None]:
        """A context in which the running pass carries the rows of its first look only."""

    def point(self, module: nn.Module, look: int | None, several: bool) -> None:
        """Points the module's own vectors to those of a look; several: the pass carries more than one look."""

    def shapes_of(self, module: nn.Module) -> dict[str, torch.Size]:
        """The shapes of the module's own parameters (they may be empty between passes), by name."""

    def vectors_at_looks(self, module: nn.Module) -> dict[str, torch.Tensor] | None:
        """[L, ..] for each of the module's own parameters: its values at the looks of the running pass, in the dtype
        of compute. None: not all of them differ by look."""

    def graph_key(self) -> tuple[Share | int | None, ...] | None:
        """Equal for passes whose factors are at the same addresses; None: the addresses change."""

    def added_to(self, layer: nn.Module) -> Added | None:
        """What the layer adds; None: nothing."""

    def see(self, layer: nn.Module, x: torch.Tensor) -> None:
        """Called with the input of each layer that adds factors."""

    def as_saved(self, tensor: FlatTensor, home: torch.Tensor, merged: bool = True) -> torch.Tensor:
        """A parameter with its factors merged; merged=False: a matrix as it is at home."""

    def write_files(self, path: Path) -> None:
        """Adds files to a model directory, for what is not part of its weights."""

    def sample(self, tensor: FlatTensor) -> torch.Tensor | None:
        """What is trained beside a parameter's home; None: nothing."""

    def settle(self) -> None:
        """Merges everything that was trained into the weights at home, because another method will train them."""


def install(model: Any, layers: list[nn.Module]) -> None:
    """Makes these linear layers add the model's factors. Once per model and layer."""
    for layer in layers:
        if id(layer) not in model.factored:
            model.factored.add(id(layer))
            model.patches.forward(layer, _forward(weakref.ref(model), layer))


def _forward(model: Callable[[], Any], layer: nn.Module) -> Forward:
    ordinary, tiles = layer.forward, model().tiles.get(id(layer))

    def forward(x: torch.Tensor) -> torch.Tensor:
        owner = model()
        factors: Any = None if owner is None or torch.is_grad_enabled() else owner.low_rank
        added = None if factors is None else factors.added_to(layer)
        x = pending.finished(x)
        if added is None:
            return ordinary(x)
        factors.see(layer, x)
        if (share := factors.running) is not None and share.count > 1:
            share.check(x)
        if torch.is_autocast_enabled(x.device.type):  # computed in the model's dtype, returned in that of the region
            y = product(x.to(added.v_rI.dtype), layer, added, tiles)
            return y.to(torch.get_autocast_dtype(x.device.type))
        return product(x, layer, added, tiles)

    return forward


def install_relu(model: Any, pairs: list[tuple[nn.ReLU, nn.Module]]) -> None:
    """Makes each ReLU add what its input lacks, and compute the sketch of the layer after it (sketches.py). Once per
    model and ReLU."""
    for activation, layer in pairs:
        if id(activation) not in model.factored:
            model.factored.add(id(activation))
            model.patches.forward(activation, _relu(weakref.ref(model), activation, weakref.ref(layer)))


def _relu(model: Callable[[], Any], activation: nn.ReLU, layer: Callable[[], Any]) -> Forward:
    ordinary = activation.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        owner = model()
        factors: Any = None if owner is None or torch.is_grad_enabled() else owner.low_rank
        added = None if factors is None else factors.added_to(layer())
        readers = None if added is None else added.readers
        if readers is None or (x.shape[-1], x.dtype) != (readers.v_kI.shape[1], readers.v_kI.dtype):
            return ordinary(pending.finished(x))
        if getattr(x, "keyhole_rectified", False):  # the layer before has no factors (fused_relu.py)
            return x
        return sketching_relu(x, readers)

    return forward


def install_by_look(model: Any, modules: list[nn.Module], factors: LowRank) -> None:
    """Makes these modules, which own vectors, use those of each look of a pass: norms at once, others one look after
    the other. Once per model and module."""
    for module in modules:
        if id(module) not in model.factored:
            model.factored.add(id(module))
            known = find_norm(module, factors.shapes_of(module), model.device, model.dtype)
            model.patches.forward(module, _by_look(weakref.ref(model), module, known))


def _by_look(model: Callable[[], Any], module: nn.Module, known: Known | None) -> Forward:
    ordinary = module.forward
    module_of: Callable[[], Any] = weakref.ref(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        owner = model()
        factors: Any = None if owner is None or torch.is_grad_enabled() else owner.low_rank
        args, kwargs = pending.finished(args), pending.finished(kwargs)
        if factors is None:
            return ordinary(*args, **kwargs)
        share = factors.running
        if share is None or share.count == 1:
            factors.point(module_of(), None if share is None else share.first, several=False)
            return ordinary(*args, **kwargs)
        if any(p.requires_grad for p in module_of()._parameters.values() if p is not None):
            factors.part()
        if known is not None and len(args) == 1 and not kwargs:
            y = _norm_at_once(args[0], module_of(), known, factors, share)
            if y is not None:
                return y
        outputs = []
        for look in range(share.count):
            factors.point(module_of(), share.first + look, several=True)
            own = {name: rows_of_look(value, look, share) for name, value in kwargs.items()}
            outputs.append(ordinary(*(rows_of_look(value, look, share) for value in args), **own))
        return _together(outputs, share)

    return forward


def _norm_at_once(x: Any, module: nn.Module, known: Known, factors: LowRank, share: Share) -> torch.Tensor | None:
    """The norm of the rows of all looks; None if x is something else than rows."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or x.shape[0] not in (share.rows, share.tokens):
        return None
    vectors = factors.vectors_at_looks(module)
    if vectors is None or any(w.shape[1:] != x.shape[-1:] or w.dtype != x.dtype for w in vectors.values()):
        return None
    x_MD = x.reshape(-1, x.shape[-1])  # a view, if the distances between rows allow it
    x_MD = x_MD if x_MD.stride(1) == 1 else x_MD.contiguous()
    y_MD = ops.norm(x_MD, vectors["weight"], vectors.get("bias"), getattr(module, known.eps), known.kind)
    return y_MD.view(x.shape)


def rows_of_look(value: Any, look: int, share: Share) -> Any:
    """The rows of a look; a value without rows is the same for all looks."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] not in (share.rows, share.tokens):
        return value
    size = value.shape[0] // share.count
    return value[look * size : (look + 1) * size]


def _together(outputs: list[Any], share: Share) -> torch.Tensor:
    first = outputs[0]
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        raise NotByRows(f"a {type(first).__name__} as output")
    if first.shape[0] * share.count not in (share.rows, share.tokens):
        if first.shape[0] != 1:
            raise NotByRows(f"an output of {tuple(first.shape)} for {share.rows} rows")
        outputs = [one.expand(share.rows // share.count, *one.shape[1:]) for one in outputs]  # the same for all rows
    return torch.cat(outputs)


def product(x: torch.Tensor, layer: Any, added: Added, tiles: RowTiles | None = None) -> torch.Tensor:
    """The layer's output, with its factors added, or waiting for what reads it (pending.py)."""
    looks, _, outputs = added.b_LrO.shape
    x_MI = x.reshape(-1, x.shape[-1]).contiguous()
    p_LMr = sketch(x, added.v_rI, added.readers).unflatten(0, (looks, -1))
    waits = added.waits and pending.may_wait()
    if waits:
        y_MO = torch.empty(len(x_MI), outputs, dtype=x.dtype, device=x.device)
    else:
        y_MO = ops.widen(p_LMr, added.b_LrO, added.bias_LO, x.dtype).view(-1, outputs)
    beta = 0 if waits else 1  # 0: what is there is not read
    if added.earlier is not None:
        a_kO, v_kI = added.earlier
        y_MO.addmm_(x_MI @ v_kI.t(), a_kO, beta=beta)
        beta = 1
    if tiles is None:
        y_MO.addmm_(x_MI, layer.weight if added.transposed else layer.weight.t(), beta=beta)
    else:
        for i, (first, last) in enumerate(tiles.rows):
            y_MO[:, first:last].addmm_(x_MI, tiles.weight(i).t(), beta=beta)
    shape = *x.shape[:-1], outputs
    return pending.wait(y_MO, (p_LMr, added.b_LrO, added.bias_LO), shape) if waits else y_MO.view(shape)
