"""Which tensors of the blocks a low-rank direction perturbs, and where their factors are stored.

    matrices    W [O, I] of the linear layers of blocks: a [r, O] and v [r, I]; W changes by a^T v
    vectors     everything else in the blocks' units (biases): full size, in float32

All a and all vectors are adjacent in one array, the *factors* (float32, on the device), all v in another, in the dtype
of compute. Their elements have indices after those of the model's own elements, so that their noise is a function of
(seed, step, element) like that of every weight, and independent of all other noise:

    0 .. numel       numel' .. numel' + n        ..        + m           (each begins at a multiple of ALIGN)
    the model        factors: U of a step                  v of a period, its number as the step

Tensors of the common unit, the table and the head have no factors: they stay dense (methods/zo/update.py).

Only a layer whose own forward is called can have factors. A matrix that other code uses (stacks of experts, the layers
of a state-space mixer) cannot, and as a "vector" in float32 it would be too large: such models are refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from keyhole.errors import UserError
from keyhole.methods.base import Skeleton
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Layout
from keyhole.model.structure.reach import reads_inside

ALIGN = 8192  # a tile of noise
MOST_VECTORS = 0.05  # maximum share of the blocks' elements in vectors
LINEAR = ("Linear", "Conv1D", "FalconLinear")  # classes that compute x W^T + b (GPT-2's: x W + b), and nothing else


@dataclass(frozen=True)
class Matrix:
    """The factors of one linear layer. bias: its index among the factors, or the tensor of the common unit."""

    tensor: FlatTensor
    layer: nn.Module = field(repr=False)
    inputs: int
    outputs: int
    transposed: bool  # GPT-2 stores [I, O]
    a: slice
    v: slice
    bias: slice | FlatTensor | None


@dataclass(frozen=True)
class Vector:
    """A tensor that is trained at full size; name: of the parameter in the module that owns it."""

    tensor: FlatTensor
    owner: nn.Module = field(repr=False)
    name: str
    at: slice


@dataclass(frozen=True)
class Parts:
    """All parts. numel: of the factors; the first `a_numel` of them belong to matrices."""

    rank: int
    matrices: list[Matrix]
    vectors: list[Vector]
    a_numel: int
    numel: int
    v_numel: int
    start: int  # index of the first factor
    v_start: int


def _trained(layout: Layout) -> dict[int, FlatTensor]:
    """What the blocks' units train, by the id of its parameter."""
    return {id(t.param): t for unit in layout.of_kind("block") for t in unit.tensors if t.param.requires_grad}


def factor_sides(layout: Layout) -> tuple[int, int, int]:
    """(outputs of all matrices, their inputs, elements of all vectors), from shapes alone: for plans."""
    shapes = [tensor.shape for tensor in _trained(layout).values()]
    matrices = [shape for shape in shapes if len(shape) == 2]
    vectors = sum(shape.numel() for shape in shapes if len(shape) != 2)
    return sum(shape[0] for shape in matrices), sum(shape[1] for shape in matrices), vectors


def called_layers(blocks: list[nn.Module]) -> Iterator[nn.Module]:
    """The linear layers of the blocks whose own forward is called."""

    def inside(part: nn.Module) -> Iterator[nn.Module]:
        if type(part).__name__ in LINEAR and isinstance(part, nn.Linear | Conv1D):
            yield part
        elif not reads_inside(part):
            for child in part.children():
                yield from inside(child)

    for block in blocks:
        yield from inside(block)


def find_parts(model: Model | Skeleton, rank: int) -> Parts:
    """The parts of a model; UserError if it has no linear layers, too many other weights, or no matrix with room for
    the rank."""
    layout, tensors = model.layout, _trained(model.layout)
    in_common = {id(t.param): t for t in layout.common.tensors}
    layers = {id(layer.weight): layer for layer in called_layers(model.blocks)}
    shapes = {}
    for i, (rows, columns) in {i: tensor.shape for i, tensor in tensors.items() if i in layers}.items():
        transposed = isinstance(layers[i], Conv1D)  # it is stored as [inputs, outputs]
        shapes[i] = (rows, columns, True) if transposed else (columns, rows, False)
    a_numel = rank * sum(outputs for _, outputs, _ in shapes.values())
    places, end = {}, a_numel
    for i, tensor in tensors.items():
        if i not in layers:
            places[i] = slice(end, end + tensor.shape.numel())
            end = places[i].stop
    _check(layout, rank, shapes, [tensors[i] for i in places], end - a_numel)
    owners = {id(p): (owner, name) for owner in model.module.modules() for name, p in owner._parameters.items()}
    matrices, a_end, v_end = [], 0, 0
    for i, (inputs, outputs, transposed) in shapes.items():
        bias = getattr(layers[i], "bias", None)
        place = places.get(id(bias)) or (in_common.get(id(bias)) if bias is not None else None)
        a, v = slice(a_end, a_end + rank * outputs), slice(v_end, v_end + rank * inputs)
        matrices.append(Matrix(tensors[i], layers[i], inputs, outputs, transposed, a, v, place))
        a_end, v_end = a.stop, v.stop
    vectors = [Vector(tensors[i], *owners[i], at) for i, at in places.items()]
    start = -(-layout.numel // ALIGN) * ALIGN
    return Parts(rank, matrices, vectors, a_numel, end, v_end, start, start + -(-end // ALIGN) * ALIGN)


def _check(
    layout: Layout, rank: int, shapes: dict[int, tuple[int, int, bool]], vectors: list[FlatTensor], numel: int
) -> None:
    """With as many terms as the shorter side, V spans all inputs or U all outputs: more terms only cost more. Narrower
    matrices (k and v beside q) are no reason to refuse."""
    total = sum(unit.numel for unit in layout.of_kind("block"))
    if numel > MOST_VECTORS * total:
        large = max(vectors, key=lambda tensor: tensor.shape.numel())
        raise UserError(
            f"zo.rank: {numel / total:.0%} of this model's blocks is in no linear layer whose own forward runs (the "
            f"largest is {large.name}, {tuple(large.shape)}), and directions of low rank exist for linear layers only; "
            "set zo.rank=null"
        )
    others = {id(tensor.param) for tensor in vectors}
    experts = [unit for unit in layout.of_kind("block") if unit.expert is not None]
    if cut := next((t for unit in experts for t in unit.tensors if id(t.param) in others), None):
        raise UserError(
            f"zo.rank: {cut.name} is a stack of experts, each a unit of its own, and is trained at full size beside "
            "directions of low rank, as one; set expert_units=false, freeze it, or set zo.rank=null"
        )
    if not shapes:
        raise UserError("zo.rank: this model has no linear layers in its blocks that are trained; set zo.rank=null")

    most = max(min(inputs, outputs) for inputs, outputs, _ in shapes.values())
    if rank > most:
        raise UserError(
            f"zo.rank: found {rank}, and no linear layer in the blocks of this model has a shorter side of more than "
            f"{most}: more terms than that reach no more directions, in more numbers; set zo.rank={most} or less (1 to "
            "8 are usual), or zo.rank=null for dense directions"
        )


def vector_at(flat: torch.Tensor, vector: Vector) -> torch.Tensor:
    """A vector, in its shape, out of an array of factors."""
    return flat[vector.at].view(vector.tensor.shape)
