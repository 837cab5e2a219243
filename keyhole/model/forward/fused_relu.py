"""A linear layer and the ReLU after it as one product.

    y = max(x W^T + b, 0)

The product kernel ends with each y in a register. Without fusion it writes y, and a second kernel reads it, takes the
maximum and writes it again: 2 M O more numbers to and from memory (OPT-13B, 4 x 2048 tokens, 16 bit: 640 MiB per block
and pass, and 320 MiB more at the peak). cuBLAS adds b and takes the maximum before it writes, with the same bits (H200:
704 -> 697 and 714 -> 701 ms per step of 40 blocks).

This is done in lockstep passes without gradients: zeroth-order steps and evaluation. Elsewhere both layers run unfused:
on the CPU, whose product has no such option; in compiled code, where the compiler decides; in a layer that is computed
in tiles (row_tiles.py); and if there is code between the two layers: an adapter that wraps the linear layer and adds to
its output (methods/lora/), or a forward hook on it.

Applying a ReLU twice changes nothing, but leaving it out gives wrong results. So only the product decides: it marks its
output, and the activation skips exactly the outputs with that mark.
Legend: M tokens, O outputs, I inputs.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from keyhole.model.forward.lockstep import Lockstep
from keyhole.model.structure.find import find_blocks, relu_pair

Forward = Callable[[torch.Tensor], torch.Tensor]


def fuse_relu(model: Any) -> None:
    """Gives the two layers of every such pair a forward in which the product applies the ReLU if possible."""
    for block in find_blocks(model.module):
        if pair := relu_pair(block):
            layer, activation = pair
            model.patches.forward(layer, _product(weakref.ref(model), block, layer, activation))
            model.patches.forward(activation, _activation(activation))


def has_epilogue(x: torch.Tensor) -> bool:
    """Whether the library's product for this tensor can apply a ReLU."""
    return x.is_cuda


def _product(model: Callable[[], Any], block: nn.Module, layer: nn.Linear, activation: nn.ReLU) -> Forward:
    def without_gradients() -> bool:
        conductor = None if torch.is_grad_enabled() or (owner := model()) is None else owner.conductor
        return isinstance(conductor, Lockstep) and not conductor.grad  # grad: the block will be recomputed with a graph

    def nothing_between() -> bool:
        return relu_pair(block) == (layer, activation) and not layer._forward_hooks

    def forward(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not (has_epilogue(x) and without_gradients() and nothing_between()):
            return nn.Linear.forward(layer, x)  # looked up now: model/backward/compiled_linear.py replaces it
        x_MI = x.reshape(-1, x.shape[-1])
        y_MO = torch._addmm_activation(layer.bias, x_MI, layer.weight.t(), use_gelu=False)
        y: Any = y_MO.view(*x.shape[:-1], y_MO.shape[-1])
        y.keyhole_rectified = True
        return y

    return forward


def _activation(activation: nn.ReLU) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and getattr(x, "keyhole_rectified", False):
            return x
        return nn.ReLU.forward(activation, x)

    return forward
