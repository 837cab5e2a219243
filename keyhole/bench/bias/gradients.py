"""Gradients of some matrices of a model on some data: one set to fit projectors to, and a held-out set.

Each gradient is computed from `batch` rows of the data, in micro-batches; no row is used twice. Only the chosen
matrices are differentiated. The loss is summed, not averaged: biases are relative, so the scale does not matter. Device
memory: 4 bytes x elements of the chosen matrices x gradients, and the model.
"""

from dataclasses import dataclass

import torch

import keyhole
from keyhole import assets
from keyhole.data.loader import Loader
from keyhole.data.prepare import prepare
from keyhole.errors import UserError
from keyhole.model.structure.layout import FlatTensor

Grads = dict[str, list[torch.Tensor]]


@dataclass(frozen=True)
class Sampling:
    """Where gradients come from."""

    model: str = "demo"
    data: str = "demo"
    device: str = "cpu"
    batch: int = 16  # rows per gradient
    micro_batch: int = 16
    length: int = 128  # largest number of tokens of a row
    calibration: int = 4  # gradients to fit on
    held_out: int = 8  # held-out gradients
    matrices: int = 16  # number of matrices of the blocks; 0: all
    seed: int = 0


def sample(how: Sampling) -> tuple[Grads, Grads]:
    """Gradients by the name of their matrix: to fit on, and held out."""
    model = keyhole.load(assets.locate(how.model, assets.MODEL), dtype="float32", device=how.device)
    try:
        chosen = chosen_matrices(model, how.matrices)
        return _differentiate(model, chosen, how)
    finally:
        model.close()


def chosen_matrices(model: keyhole.Model, count: int) -> list[FlatTensor]:
    """`count` matrices, from evenly spread blocks and from each place in a block in turn; 0: all matrices."""
    blocks: dict[int, list[FlatTensor]] = {}
    for tensor in model.layout.tensors:
        if tensor.block is not None and len(tensor.shape) == 2:
            blocks.setdefault(tensor.block, []).append(tensor)
    every = [tensor for members in blocks.values() for tensor in members]
    if not every:
        raise UserError("--model: its blocks have no matrices")
    if count == 0 or count >= len(every):
        return every
    listed = list(blocks.values())
    places = [listed[i * len(listed) // count] for i in range(count)]
    chosen = {id(t): t for i, members in enumerate(places) for t in (members[i % len(members)],)}
    return list(chosen.values())


def _differentiate(model: keyhole.Model, chosen: list[FlatTensor], how: Sampling) -> tuple[Grads, Grads]:
    source = assets.locate(how.data, assets.TRAIN)
    needed = (how.calibration + how.held_out) * how.batch
    dataset = prepare(str(source), model.tokenizer, max_length=how.length)
    if len(dataset) < needed:
        raise UserError(
            f"--data: {how.data} has {len(dataset)} rows, and {how.calibration} + {how.held_out} gradients of "
            f"{how.batch} rows need {needed}, none of them twice; give more data, or lower --batch, --calibration or "
            "--held-out"
        )
    if how.batch % how.micro_batch:
        raise UserError(f"--micro-batch: {how.micro_batch} does not divide --batch {how.batch}")
    loader = Loader(dataset, how.micro_batch, how.batch // how.micro_batch, seed=how.seed, pad_to_multiple_of=1)
    for param in model.module.parameters():
        param.requires_grad_(False)
    for tensor in chosen:
        tensor.param.requires_grad_()
    seen: dict[str, list[torch.Tensor]] = {t.name: [] for t in chosen}
    held: dict[str, list[torch.Tensor]] = {t.name: [] for t in chosen}
    for i in range(how.calibration + how.held_out):
        for batch in model.to_device(loader.next_step()):
            hidden = model.hidden(batch)
            loss = (
                model.head.nll(hidden, batch.target_N).sum()
                if model.classifies
                else model.head.loss_sum(hidden, batch.target_N)
            )
            loss.backward()
        for tensor in chosen:
            assert tensor.param.grad is not None
            (seen if i < how.calibration else held)[tensor.name].append(tensor.param.grad)
            tensor.param.grad = None
    return seen, held
