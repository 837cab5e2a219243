"""The layers of a model, as far as they add low-rank factors to what they compute (model/forward/low_rank.py).

The model holds this object while factors are trained beside its weights. Its layers ask it for the terms that they add:
those of the running pass, which carries one or several looks of a step (`Share`), or of the unperturbed weights outside
of a step. What the factors are, and how they are trained, is in factors.py.

    a linear layer of a block         x W^T + (x V) A^T, with the A of each look for its rows
    another module with vectors       norms and other modules whose trained parameters differ by look: called with
                                      those of the look, or look by look
    the model's own files             the factors are merged into a copy of the weights (merge.py)
"""

import weakref

import torch

from keyhole.errors import UserError
from keyhole.methods.zo.low_rank import merge
from keyhole.methods.zo.low_rank.factors import Factors
from keyhole.methods.zo.low_rank.guide import Guide
from keyhole.methods.zo.low_rank.parts import Vector, vector_at
from keyhole.model.forward.low_rank import Added, LowRank, Share, install, install_by_look, install_once
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor
from keyhole.model.weights.homes import view


class FactoredLayers(LowRank):
    """The layers of one model, which add these factors from now on. guide: sees the inputs of layers."""

    def __init__(self, model: Model, factors: Factors, guide: Guide | None = None) -> None:
        """Makes the module's forward ask for the factors: in linear layers, in blocks before the first trained weight,
        and in other modules with vectors of their own, in a block or in the spine."""
        self.model: Model = weakref.proxy(model)  # which holds this object
        self.factors, self.guide, self.shares, self.differ = factors, guide, {}, set()
        self.by_layer = {id(matrix.layer): i for i, matrix in enumerate(factors.parts.matrices)}
        self.by_owner: dict[int, list[Vector]] = {}  # vectors of modules without a matrix, by module
        for vector in factors.parts.vectors:
            if id(vector.owner) not in self.by_layer:
                self.by_owner.setdefault(id(vector.owner), []).append(vector)
        self.in_spine: dict[int, list[FlatTensor]] = {}  # by module
        spine = {id(t.param): t for t in model.layout.spine.tensors}
        inside = model.module if model.classifies else model.head.decoder
        others = [m for m in inside.modules() if id(m) not in self.by_layer]
        for owner in others:
            if own := [spine[id(p)] for p in owner._parameters.values() if id(p) in spine]:
                self.in_spine[id(owner)] = own
        owners = [m for m in others if id(m) in self.in_spine.keys() | self.by_owner.keys()]
        plain = not model.classifies and not model.head.transforms
        self.together = plain and not any(any(owner.children()) for owner in owners)
        install(model, [m.layer for m in factors.parts.matrices])
        self.trained_blocks = {id(b) for b in model.blocks if any(p.requires_grad for p in b.parameters())}
        if model.blocks and id(model.blocks[0]) not in self.trained_blocks:
            install_once(model, model.blocks)
        install_by_look(model, owners if self.together else [m for m in owners if id(m) in self.by_owner])
        model.methods.low_rank = self

    def describe(self) -> list[str]:
        """Lines for the start block."""
        factors, parts = self.factors, self.factors.parts
        end = "folded into the weights" if factors.folds else "kept beside weights that never change"
        size = (4 * (factors.now.numel() + factors.looks.numel()) + factors.v.nbytes) / 2**20
        what = f"low rank: z = U V^T / sqrt({factors.rank}) in {len(parts.matrices)} linear layers"
        learned = f"learned in {parts.numel:,} numbers ({size:.1f} MiB with V and looks)"
        if self.guide is not None:
            what += (
                f", V from the errors of {self.guide.rows:,} rows (all, if there are fewer) at the start of each period"
            )
        when = f"every {factors.refresh} steps a new V, and what was learned is {end}"
        if self.guide is None:
            share = factors.rank / (factors.rank + 1)
            when += f"; the best rate is about {share:.2f} of that of dense directions, or less"
        passes = "one for all looks at a batch" if self.together else "one for each look at a batch"
        return [f"{what}, {learned}; {when}", f"passes: {passes}"]

    # -- the looks of a step ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """UserError if the model does not use them any more."""
        if self.model.methods.low_rank is not self:
            raise UserError(
                "zo.rank: another method was made on this model since, and what the factors had learned was merged "
                "into its weights: the layers do not see them any more. Make a new ZO to train on"
            )

    # -- what the layers ask for, in a pass ------------------------------------------------------------------------

    def graph_key(self) -> tuple[Share | int | None, ...] | None:
        if not self.shares or not self.factors.folds or self.spines is None:
            return None
        memory = (self.factors.looks, self.factors.v, self.spines)
        return self.running, *(tensor.data_ptr() for tensor in memory)

    def added_to(self, layer: torch.nn.Module) -> Added | None:
        """What the layer's product adds."""
        index = self.by_layer.get(id(layer))
        if index is None:
            return None
        factors, share, bias = self.factors, self.running, None
        matrix = factors.parts.matrices[index]
        flat = factors.now[None] if share is None else factors.looks[share.first : share.first + share.count]  # [L, n]
        if isinstance(matrix.bias, slice):
            bias = flat[:, matrix.bias]
        elif matrix.bias is not None and self.spines is not None and share is not None:
            begin = matrix.bias.start - self.model.layout.spine.start
            bias = self.spines[share.first : share.first + share.count, begin : begin + matrix.outputs]
        elif (own := getattr(layer, "bias", None)) is not None:
            bias = own[None].expand(flat.shape[0], -1)
        earlier = factors.kept.rooms[index] if factors.kept.periods else None
        b_LrO = flat[:, matrix.a].unflatten(1, (factors.rank, matrix.outputs))
        return Added(factors.rows(factors.v, matrix.v), b_LrO, bias, earlier, matrix.transposed)

    def see(self, layer: torch.nn.Module, x: torch.Tensor) -> None:
        if self.guide is not None and self.guide.inputs is not None:
            self.guide.inputs.see(self.by_layer[id(layer)], x)

    def point(self, module: torch.nn.Module, look: int | None, several: bool) -> None:
        flat = self.factors.now if look is None else self.factors.looks[look]
        for vector in self.by_owner.get(id(module), ()):
            vector.tensor.param.data = vector_at(flat, vector).to(self.model.dtype)
        if several:
            assert self.spines is not None  # a pass carries several looks in a step only
            for tensor in self.in_spine.get(id(module), ()):
                tensor.param.data = view(self.spines[look], tensor, self.model.layout.spine.start)

    # -- beside the model's weights --------------------------------------------------------------------------------

    def as_saved(self, tensor: FlatTensor, home: torch.Tensor, merged: bool = True) -> torch.Tensor:
        return merge.as_saved(self.factors, tensor, home, merged)

    def sample(self, tensor: FlatTensor) -> torch.Tensor | None:
        return self.factors.sample(tensor)

    def settle(self) -> None:
        merge.settle(self.factors)
