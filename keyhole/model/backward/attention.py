"""Attention whose backward pass gives the same bits every time.

A fused backward of attention adds up dq over tiles of keys by atomic additions, in the order in which the tiles happen
to be ready. Sums in another order have other last bits, so two steps from the same weights differ, and a streamed run
from a resident one, as soon as there are several tiles (one H200, bf16, 32 heads of 128, one backward seven times):

    tokens            cuDNN            flash            flash, deterministic
    2 x 128           the same         the same         the same
    1 x 512           the same         differs          the same
    4 x 1024          differs          differs          the same
    1 x 2048          differs          differs          the same
    forward and backward of 4 x 1024   0.38 ms          0.71 ms             0.76 ms

cuDNN has no other way, so it is not used for passes that will be differentiated if keys are more than one TILE. Flash
and memory-efficient attention have one, which a flag of the process chooses (torch.use_deterministic_algorithms). The
flag also concerns other operations, which raise errors or become slow, so it is set while an attention node of autograd
runs, and at no other time: by hooks before and after the node. Compiled code has no such nodes; there attention without
a mask is an operation of ours, whose backward sets the flag. (With a mask, or with dropout, compiled attention is as
PyTorch has it.)

Bytes: flash's deterministic backward keeps a dq in fp32 for each of ceil(multiprocessors / (rows x heads)) groups of
tiles: 32 KB per token of a Llama-7B at 4 x 1024. The backward pass of its MLP, which is over by then, needs more.
A loss that was computed outside of a step (`backward(loss)`) has the attention of whoever computed it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.nn import functional as F

from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.machine.held import Changes, Setting, attribute

TILE = 128  # keys of one tile, at least
DEPTH = 4  # of a graph in which the attention's node is looked for: its output may be a part of a padded one
HALVES = (torch.bfloat16, torch.float16)
CUDNN = Setting(torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp)


class _Before:
    """What was set before, and is set again: attention, and whether all algorithms are to be deterministic."""

    attention: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
    deterministic, warns = False, False
    flash = False  # whether the GPU has flash attention, and the user has not switched it off


@contextmanager
def exact_attention(device: torch.device, longest: int) -> Iterator[None]:
    """A context for passes that will be differentiated, and for their recomputation. longest: tokens of a row."""
    if device.type != ACCELERATOR or longest <= TILE:
        yield
        return
    flags, before = torch.backends.cuda, F.scaled_dot_product_attention  # ours, in a context within another
    _Before.attention = _Before.attention if before is attention else before
    _Before.deterministic = torch.are_deterministic_algorithms_enabled()
    _Before.warns = torch.is_deterministic_algorithms_warn_only_enabled()
    ampere = accelerator.is_initialized() and accelerator.get_device_capability(device) >= (8, 0)
    _Before.flash = ampere and flags.flash_sdp_enabled()
    others = flags.flash_sdp_enabled() or flags.mem_efficient_sdp_enabled() or flags.math_sdp_enabled()
    with Changes() as changes:
        changes.callback(_reset)
        if others:  # a user may have chosen cuDNN's alone (sdpa_kernel)
            changes.set(CUDNN, False)
        changes.set(attribute(torch.utils.deterministic, "fill_uninitialized_memory"), False)
        changes.set(attribute(F, "scaled_dot_product_attention"), attention)
        yield


def _set(*unused: object) -> None:
    torch._C._set_deterministic_algorithms(True, warn_only=False)


def _reset(*unused: object) -> None:
    torch._C._set_deterministic_algorithms(_Before.deterministic, warn_only=_Before.warns)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **more: object,
) -> torch.Tensor:
    """torch's scaled_dot_product_attention, with a backward pass that gives the same bits every time. more: what
    another version or attention takes."""
    if torch.compiler.is_compiling() and _Before.flash and not more:
        known = attn_mask is None and dropout_p == 0.0 and query.dtype in HALVES and query.dim() == 4
        if known and query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0:
            return torch.ops.keyhole.attention(query, key, value, is_causal, scale)[0]
    more |= {"enable_gqa": True} if enable_gqa else {}
    more |= {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    output = _Before.attention(query, key, value, **more)
    if not torch.compiler.is_compiling() and output.requires_grad:
        for node in _attention_nodes(output.grad_fn):
            node.register_prehook(_set)
            node.register_hook(_reset)
    return output


def _attention_nodes(node: Node | None, depth: int = DEPTH) -> list[Node]:
    """The nodes of fused attention at or below a node of autograd's graph."""
    if node is None or depth == 0:
        return []
    if "ScaledDotProduct" in node.name():
        return [node]
    return [found for below, _ in node.next_functions for found in _attention_nodes(below, depth - 1)]


# -- for compiled code: flash attention as two opaque operations ------------------------------------------------------


@torch.library.custom_op("keyhole::attention", mutates_args=())
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return found[0].transpose(1, 2).contiguous().transpose(1, 2), found[1].clone()


@_attention.register_fake
def _attention_shape(q: torch.Tensor, *unused: object) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length, width = q.shape
    return q.new_empty((batch, length, heads, width)).transpose(1, 2), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("keyhole::attention_reverse", mutates_args=())
def _attention_reverse(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    longest = q.shape[2], k.shape[2]
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, of which there is none
    _set()
    try:
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, sums, None, None, *longest, 0.0, causal, seed, seed, scale=scale
        )
    finally:
        _reset()
    return tuple(grad.contiguous() for grad in found)


@_attention_reverse.register_fake
def _attention_reverse_shape(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: object
) -> tuple[torch.Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _reverse(ctx: Any, d_out: torch.Tensor, d_sums: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.keyhole.attention_reverse(d_out, *ctx.saved_tensors, ctx.causal, ctx.scale)
    return *grads, None, None


_attention.register_autograd(_reverse, setup_context=_setup)
