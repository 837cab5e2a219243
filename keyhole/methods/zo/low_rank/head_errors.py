"""The error at the head, for directions that follow it (guide.py): gradients with respect to the hidden states that the
head reads, by forward passes and the reverse of the head alone.

    language models    hidden states at the positions that predict a trained token; the head is a matrix over the
                       vocabulary, reversed chunk by chunk (backward/vocabulary.py)
    classifiers        the output of the last block. What comes after it (a norm, a pooler, a matrix of a few labels) is
                       the module's own code: it runs with a graph, through which the gradient of the logits returns. It
                       is 0 except at the positions that the head reads: the first or the last token of a row, or all.

Bytes on the device: 4 N H for N positions; of a classifier also what comes after the last block keeps for its graph,
for all passes, and the gradient of one pass at all its tokens.
Legend: B rows, N positions, H width, L labels, M tokens.
"""

from typing import Any

import torch

from keyhole.model.backward.vocabulary import VocabularyGradients
from keyhole.model.batch import DeviceBatch
from keyhole.model.classification import ClassificationHead
from keyhole.model.forward.evaluation import swept
from keyhole.model.model import Model


def token_errors(
    model: Model, sent: list[DeviceBatch], positions: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[torch.Tensor]:
    """[N, H] float32, per batch. positions: the N distinct ones, and which of them each trained token has."""
    head = VocabularyGradients(model)
    swept(model, sent, lambda hidden, spine: [head.loss(hidden, sent, spine, loss_count=1)])
    units = [unit.index for unit in model.layout.head_units]
    with model.engine.sweep("guide", units):
        try:
            head.spine = model.device_weights.acquire(model.layout.spine)
            head.restart(1.0)
            grads = head.hidden_grads()
        finally:
            model.binding.bind_homes()
    return [_summed(d, place_N, len(at)) for d, (at, place_N) in zip(grads, positions, strict=True)]


def _summed(d_NH: torch.Tensor, place_N: torch.Tensor, count: int) -> torch.Tensor:
    """The errors of each of `count` positions: candidates of one token behind the same prompt share theirs, and their
    errors are opposite. A product with zeros and ones, since index_add_ has no fixed order on a GPU."""
    return d_NH if count == len(d_NH) else torch.nn.functional.one_hot(place_N, count).float().t() @ d_NH


def class_errors(model: Model, sent: list[DeviceBatch], most: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Positions [N] that the head reads, and their errors [N, H] in float32, per batch; of more than `most` in all,
    some at equal distances. None, if the last block has other positions than the tokens of the batch (Funnel)."""
    leaves: dict[int, torch.Tensor] = {}

    def enter(block: torch.nn.Module, inputs: Any) -> None:
        torch.set_grad_enabled(False)  # of this pass's thread; a block may be called more than once

    def leave(block: torch.nn.Module, inputs: Any, output: Any) -> Any:
        """After the last block: its output becomes a leaf, and what comes next has a graph."""
        assert model.conductor is not None  # a pass is running
        first = output if isinstance(output, torch.Tensor) else output[0]
        leaf = leaves[model.conductor.current.index] = first.detach().requires_grad_()
        torch.set_grad_enabled(True)
        return leaf.clone() if first is output else (leaf.clone(), *output[1:])

    def errors(logits: list[torch.Tensor], spine: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        passes = enumerate(zip(logits, sent, strict=True))
        return [_read_errors(model.head, x, one, leaves.pop(i), -(-most // len(sent))) for i, (x, one) in passes]

    hooks = [block.register_forward_pre_hook(enter) for block in model.blocks]
    hooks.append(model.blocks[-1].register_forward_hook(leave))
    try:
        found = swept(model, sent, errors)
    finally:
        for hook in hooks:
            hook.remove()
    return [at_N for at_N, _ in found], [d_NH for _, d_NH in found]


def _read_errors(
    head: ClassificationHead, logits_BL: torch.Tensor, batch: DeviceBatch, leaf: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for one pass, from its logits and the output of the last block that they were computed from."""
    tokens, width = leaf.shape[:-1].numel(), leaf.shape[-1]
    if tokens != batch.inputs["input_ids"].numel() or not logits_BL.requires_grad:
        return batch.index_N[:0], leaf.new_zeros((0, width), dtype=torch.float32)
    grad_BL = head.nll_grad(logits_BL, batch.target_N, torch.ones((), device=logits_BL.device))
    (back,) = torch.autograd.grad(logits_BL, leaf, grad_BL.to(logits_BL.dtype))
    d_MH = back.reshape(tokens, width)
    at_N = d_MH.any(dim=1).nonzero().flatten()
    at_N = at_N[:: max(1, -(-len(at_N) // most))]
    return at_N, d_MH[at_N].float()
