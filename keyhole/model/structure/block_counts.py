"""What one block of a model does per token, counted from its own code: kernels, bytes they touch, activations it keeps.

Families differ: a Llama block runs 38 kernels in its forward pass, computes its norms in float32 with casts, and keeps
23 numbers of its width for autograd; an OPT block runs 13 and keeps 12. So a block of the model is run once,
forward, on the meta device, which computes shapes alone. The arguments are those with which the model's own
forward calls the block (reach.py), for LONG tokens, or SHORT if the model has fewer positions. Counted are

    kernels    operations that are not views, matrix products and attention included
    elements   numbers that the other operations read and write (products and attention are counted as FLOPs), per token
    saved      numbers that autograd keeps for the backward pass, per token, each memory once; weights and what all
               blocks share (rotary tables) not included. saved_frozen: the same if only matrices are trained (LoRA:
               their inputs are needed, those of norms are not)

in units of the model's dtype: a float32 number of a model in bfloat16 counts as two. Attention is one kernel that keeps
its inputs and its output, as the fused kernels of a GPU do. A block whose code reads values (a router) cannot be run
without them: then there are no counts, and the formulas use those of a Llama block. A module is counted once, when
its counts are first asked for: a tenth of a second, or more where products of 16 bit are slow.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from keyhole.machine.held import in_this_thread
from keyhole.model.structure.reach import LONG, SHORT, call_of, is_matrix

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach", "alias", "lift_fresh")


@dataclass(frozen=True)
class BlockCounts:
    """Per block and pass."""

    forward_kernels: int
    forward_elements: float
    saved: float
    saved_frozen: float


def block_counts(module: nn.Module, blocks: list[nn.Module]) -> BlockCounts | None:
    """The counts of the second block (the first may be of another kind), kept by the module; None if it cannot be run
    without values."""
    kept: dict[str, BlockCounts | None] = vars(module)
    if "keyhole_counts" not in kept:
        kept["keyhole_counts"] = _counts(module, blocks[1]) if blocks else None
    return kept["keyhole_counts"]


@torch.inference_mode(False)
@torch.enable_grad()  # the caller may have neither, and the counts are kept
def _counts(module: nn.Module, block: nn.Module) -> BlockCounts | None:
    call = call_of(module, block, LONG) or call_of(module, block, SHORT)
    if call is None:
        return None
    try:
        return _count(block, *tree_map(_meta, call))
    except Exception:  # raised by the family's own code: it reads values, or an operation has no meta version
        return None


def _count(block: nn.Module, args: tuple, kwargs: dict[str, object]) -> BlockCounts:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    hidden = tensors[0].requires_grad_(True)
    each = hidden.numel() // hidden.shape[-1] * hidden.element_size()
    shared = {id_of(x) for x in tensors if x is not hidden}
    counter = _Counter()
    with in_this_thread(nn.functional, "scaled_dot_product_attention", lambda *args, **_: _Attention.apply(*args[:3])):
        with counter:
            kept = _kept(block, _weights(block, frozen=False), args, kwargs, shared)
        kept_frozen = _kept(block, _weights(block, frozen=True), args, kwargs, shared)
    return BlockCounts(counter.kernels, counter.bytes / each, kept / each, kept_frozen / each)


def _weights(block: nn.Module, frozen: bool) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a block, without values. frozen: matrices alone are trained."""
    weights = {
        name: torch.empty_like(p, device="meta").requires_grad_(is_matrix(p) or not frozen)
        for name, p in block.named_parameters()
    }
    return weights | {name: torch.empty_like(b, device="meta") for name, b in block.named_buffers()}


def _kept(
    block: nn.Module, weights: dict[str, torch.Tensor], args: tuple, kwargs: dict[str, object], shared: set[int]
) -> int:
    """The bytes that autograd keeps of a block's forward pass. shared: memory that all blocks have in common."""
    saved: dict[int, torch.Tensor] = {}
    known = shared | {id_of(w) for w in weights.values()}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if id_of(x) not in known:
            saved[id_of(x)] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        torch.func.functional_call(block, weights, args, kwargs)
    return sum(x.untyped_storage().nbytes() for x in saved.values())


def id_of(x: torch.Tensor) -> int:
    """The identity of a tensor's memory."""
    return x.untyped_storage()._cdata


def _meta(x: object) -> object:
    return torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else x


class _Counter(TorchDispatchMode):
    """Counts kernels, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes = 0, 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict[str, object] | None = None
    ) -> object:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in FREE:
            return output
        self.kernels += 1
        if name not in PRODUCTS:
            touched = (x for x in tree_leaves((args, kwargs, output)) if isinstance(x, torch.Tensor))
            self.bytes += sum(x.numel() * x.element_size() for x in touched)
        return output


class _Attention(torch.autograd.Function):
    """Attention as one kernel, by its shapes."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, output)
        return output
