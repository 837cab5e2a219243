"""Layers of which only a piece need be on the device: mixtures of experts, one expert at a time; matrices that are too
large, in tiles of output rows.

A piece is a unit of its own (plan/fit.py cuts stacks and matrices): the pass visits one after the other. To keep
streamed and resident equal to the bit, a layer that is computed in pieces is always computed so, wherever its weights
live: products of some rows or tokens may differ in their last bits from the whole one, because a library may choose
another kernel for another shape. The result equals the whole product within rounding.

**Experts.** For hidden states x_TH, the router's choice of k experts per token and their weights r_Tk
(structure/find.py finds these modules):

    y_TH = sum over chosen experts e, in ascending order, of    r[t, e] down_e(act(up_e(x[t])))    for its tokens t

Transformers runs one grouped product over all experts; this code loops over the experts that received tokens. Sums are
in float32. An expert without tokens is not touched. If the stacks are cut into units, a pass needs the upper matrix of
an expert, then the lower one, then those of the next expert. Passes in lockstep need different experts. All passes wait
until the last of them has routed its tokens; then experts are loaded in ascending order, each once, for the passes that
need it (lockstep.py). From then on the order is known and prefetch follows it (Engine.expect): experts without tokens
do not cross the link. The host reads the router's choice once per layer and pass. With gradients:
model/backward/experts.py.

**Tiles.**

    y = x W^T + b        y[:, r0:r1] = x W[r0:r1]^T + b[r0:r1]        for each tile [r0, r1)

Slots and perturbed copies need room for one tile only (OPT-175B in 16 bit: 288 MiB instead of 1152). The bias belongs
to the common unit, since all tiles need it. The tiles depend only on the layer's shape (find.row_tiles). With gradients
the product is not tiled, because those methods hold full matrices.
Legend: T tokens, H width, k experts per token, M tokens of one expert, R rows of a tile.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from keyhole.errors import UserError
from keyhole.model.structure.find import Experts, row_tiles
from keyhole.model.structure.layout import Unit

Routed = tuple[int, torch.Tensor, torch.Tensor]  # (expert, its tokens, which of each token's k choices it is).
Weigh = Callable[[int], torch.Tensor]  # 0: up, 1: down -> the expert's matrix, valid until the next call.


class RowTiles:
    """The tiles of one layer. units: one per tile, if the layer is cut; None if its whole weight is bound."""

    def __init__(self, model: Callable[[], Any], layer: Any, rows: list[tuple[int, int]], units: list[Unit] | None):
        self.model, self.layer, self.rows, self.units = model, weakref.ref(layer), rows, units

    def weight(self, tile: int) -> torch.Tensor:
        """[rows, I] of a tile, bound for the running pass."""
        conductor = self.model().conductor
        layer: Any = self.layer()
        if self.units is None or conductor is None:
            return layer.weight[slice(*self.rows[tile])]
        current = conductor.current
        if current.unit is not self.units[tile]:
            current.meet(self.units[tile])
        return layer.weight  # now bound to these rows


def compute_in_pieces(model: Any) -> dict[int, RowTiles]:
    """Gives every module of experts in the layout a forward that loops over experts, and every linear layer of the
    blocks that has tiles one that loops over tiles; returns these tiles by the layer's id."""
    model_of, units, found = weakref.ref(model), dict[int, list[Unit]](), dict[int, RowTiles]()
    for unit in model.layout.of_kind("block"):
        if unit.rows is not None:
            units.setdefault(id(unit.tensors[0].param), []).append(unit)
    for experts in model.layout.experts:
        of_stacks = [units.get(id(stack)) for stack in experts.stacks]
        model.patches.forward(experts.module, _by_expert(model_of, experts, None if None in of_stacks else of_stacks))
    for layer in [part for block in model.blocks for part in block.modules()]:
        if rows := row_tiles(layer):
            tiles = found[id(layer)] = RowTiles(model_of, layer, rows, units.get(id(layer.weight)))
            model.patches.forward(layer, _in_tiles(layer, tiles))
    return found


def _in_tiles(layer: Any, tiles: RowTiles) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            if tiles.units is not None and tiles.model().conductor is not None:
                raise UserError(
                    "this model was loaded for forward passes only, with large matrices cut by rows: gradients need "
                    "whole ones. Pass keyhole.load(..., workload=Workload(method=...)) with the method that will run"
                )
            return F.linear(x, layer.weight, layer.bias)
        y: Any = None
        for i, (first, last) in enumerate(tiles.rows):
            weight_RI = tiles.weight(i)
            part = F.linear(x, weight_RI, None if layer.bias is None else layer.bias[first:last])
            if y is None:
                y = part.new_empty(*part.shape[:-1], tiles.rows[-1][1])
            y[..., first:last] = part
        return y

    return forward


def _by_expert(model: Callable[[], Any], experts: Experts, units: Any) -> Callable:
    """units: of both stacks, one per expert, if they are cut; None if the whole stacks are bound."""
    ordinary = experts.module.forward

    def forward(x_TH: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        owner = model()
        with_gradients = torch.is_grad_enabled() and owner.expert_gradients is None
        if torch.compiler.is_compiling() or with_gradients:  # compiled code has no loop, autograd needs whole stacks
            return ordinary(x_TH, top_k_index, top_k_weights)
        routed = route(top_k_index, experts.count)
        if torch.is_grad_enabled():
            return owner.expert_gradients.run(experts, units, routed, x_TH, top_k_weights)
        current = None if units is None or owner.conductor is None else owner.conductor.current
        if current is not None:
            current.ahead = [units[side][e] for e, _, _ in routed for side in (0, 1)]

        def weigh(expert: int, side: int) -> torch.Tensor:
            stack = experts.stacks[side]
            if current is None:
                return stack[expert]
            if current.unit is not units[side][expert]:
                current.meet(units[side][expert])
            return stack[0]  # now bound to this expert

        y_TH = no_sum(x_TH)
        for one in routed:
            add_expert(y_TH, experts, one, partial(weigh, one[0]), x_TH, top_k_weights)
        return y_TH.to(x_TH.dtype)

    return forward


def route(top_k_index: torch.Tensor, count: int) -> list[Routed]:
    """The experts that received tokens, ascending, each with its tokens; the host waits for the router."""
    chosen = top_k_index.t().flatten()  # first choices first, then tokens in order
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=count).tolist()
    tokens = top_k_index.shape[0]
    parts = order.split(counts)
    return [(e, parts[e] % tokens, parts[e] // tokens) for e in range(count) if counts[e]]


def no_sum(x_TH: torch.Tensor) -> torch.Tensor:
    """Zeros for a sum over experts, at least in float32."""
    return torch.zeros(x_TH.shape, dtype=torch.promote_types(x_TH.dtype, torch.float32), device=x_TH.device)


def add_expert(
    y_TH: torch.Tensor, experts: Experts, routed: Routed, weigh: Weigh, x_TH: torch.Tensor, r_Tk: torch.Tensor
) -> None:
    """Adds the weighted output of an expert for its tokens."""
    expert, token_M, choice_M = routed
    hidden = activated(experts, product(experts, 0, expert, x_TH[token_M], weigh(0)))
    y_MH = product(experts, 1, expert, hidden, weigh(1)) * r_Tk[token_M, choice_M, None]
    y_TH.index_add_(0, token_M, y_MH.to(y_TH.dtype))  # deterministic: a token chooses an expert at most once


def activated(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """The activation between the two products of an expert."""
    module: Any = experts.module
    y: torch.Tensor = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    return y


def product(experts: Experts, side: int, expert: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The first (0) or second (1) product of an expert, with its bias."""
    y = x @ weight if experts.module.is_transposed else F.linear(x, weight)
    return y + experts.biases[side][expert] if experts.biases else y
