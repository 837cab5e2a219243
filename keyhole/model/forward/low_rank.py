"""Linear layers with a matrix of low rank beside their own, several versions of it in one pass.

    y = x W^T + (x V) B_l^T + b_l        for the rows of look l = 1 .. L, one below the other (ops/lowrank/product.py)

A method that learns such matrices (methods/zo/low_rank/) gives them to the model: `Model.factors`. The layers then have
a forward that asks it what to add, in whatever pass runs: of a step, an evaluation, a generation. Without factors, and
with gradients, the forward that the layer had before is called.

x W^T is the model's own product, of the weights that are bound at the moment: a slot, a home, a tile of rows
(row_tiles.py). Where the layer has a forward of its own already (`base`), which computes x W^T from weights in another
form, that one is called, and the small part added to what it gives.

What is no linear layer has parameters as they are, and one pass carries rows of several looks: so a module with vectors
(a norm, learned positions) is called once per look, with the rows of that look and the parameters of that look, and the
results are put together again. Tokens are look by look in the first dimension of every tensor; a module that sees
another shape is one that such passes cannot run (`NotByRows`).
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from keyhole import ops
from keyhole.model.forward.row_tiles import RowTiles
from keyhole.model.structure.layout import FlatTensor

Forward = Callable[..., Any]


class NotByRows(Exception):
    """A module mixes or permutes rows, or its shapes do not tell."""


@dataclass(frozen=True)
class Added:
    """What a layer's product gets. earlier: (a, v) that all looks share; transposed: the weight lies as [I, O]."""

    v_rI: torch.Tensor
    b_LrO: torch.Tensor
    bias_LO: torch.Tensor | None
    earlier: tuple[torch.Tensor, torch.Tensor] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Share:
    """What a pass carries: looks [first, first + count), so many rows and tokens in all."""

    first: int
    count: int
    rows: int = 0
    tokens: int = 0

    def check(self, x: torch.Tensor) -> None:
        """Refuses what is not all rows, or all tokens, one after the other."""
        lead = x.shape[:-1]
        by_rows = lead[0] in (self.rows, self.tokens) or (lead[0] == 1 and len(lead) == 2)
        if lead.numel() != self.tokens or not by_rows:
            raise NotByRows(f"an input of {tuple(x.shape)} for {self.rows} rows and {self.tokens} tokens")


class Factors(Protocol):
    """What a model's layers ask of the method that learned something beside their weights."""

    @property
    def running(self) -> Share | None:
        """Of the pass that runs; None: it sees the weights as they are."""

    def point(self, module: nn.Module, look: int | None, several: bool) -> None:
        """Points the module's own vectors to those of a look; several: the pass carries more than this one."""

    def graph_key(self) -> tuple | None:
        """Equal for passes that find what is added in the same memory; None: it moves."""

    def added_to(self, layer: nn.Module) -> Added | None:
        """None: nothing."""

    def as_saved(self, tensor: FlatTensor, home: torch.Tensor, merged: bool = True) -> torch.Tensor:
        """A parameter with all that was learned; merged=False: of matrices, what is at home."""

    def write_files(self, path: Path) -> None:
        """Adds files to a model directory, for what is not in its weights."""

    def sample(self, tensor: FlatTensor) -> torch.Tensor | None:
        """What is learned of a parameter beside its home; None: nothing is."""

    def settle(self) -> None:
        """Puts all that was learned into the weights at home: somebody else will train them."""


def install(model: Any, layers: list[nn.Module]) -> None:
    """Has these linear layers add what the model's factors say. Once per model and layer."""
    for layer in layers:
        if id(layer) not in model.factored:
            model.factored.add(id(layer))
            model.patches.forward(layer, _forward(weakref.ref(model), layer))


def _forward(model: Callable[[], Any], layer: nn.Module) -> Forward:
    ordinary, tiles = layer.forward, model().tiles.get(id(layer))

    def forward(x: torch.Tensor) -> torch.Tensor:
        owner = model()
        factors = None if owner is None or torch.is_grad_enabled() else owner.factors
        added = None if factors is None else factors.added_to(layer)
        if added is None:
            return ordinary(x)
        if (share := factors.running) is not None and share.count > 1:
            share.check(x)
        return product(x, layer, added, tiles)

    return forward


def install_by_look(model: Any, modules: list[nn.Module]) -> None:
    """Has these modules, which own vectors, called once per look that a pass carries. Once per model and module."""
    for module in modules:
        if id(module) not in model.factored:
            model.factored.add(id(module))
            model.patches.forward(module, _by_look(weakref.ref(model), module))


def _by_look(model: Callable[[], Any], module: nn.Module) -> Forward:
    ordinary, module_of = module.forward, weakref.ref(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        owner = model()
        factors = None if owner is None or torch.is_grad_enabled() else owner.factors
        if factors is None:
            return ordinary(*args, **kwargs)
        share = factors.running
        if share is None or share.count == 1:
            factors.point(module_of(), None if share is None else share.first, several=False)
            return ordinary(*args, **kwargs)
        outputs = []
        for look in range(share.count):
            factors.point(module_of(), share.first + look, several=True)
            own = {name: _part(value, look, share) for name, value in kwargs.items()}
            outputs.append(ordinary(*(_part(value, look, share) for value in args), **own))
        return _together(outputs, share)

    return forward


def _part(value: Any, look: int, share: Share) -> Any:
    """The rows of a look; what has no rows is the same for all."""
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


def product(x: torch.Tensor, layer: nn.Module, added: Added, tiles: RowTiles | None = None) -> torch.Tensor:
    """The layer's output, with what is added."""
    looks, rank, outputs = added.b_LrO.shape
    x_MI = x.reshape(-1, x.shape[-1]).contiguous()
    p_LMr = ops.narrow(x_MI, added.v_rI).view(looks, -1, rank)
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
