"""A batch on its way to the device: what the decoder is given, and where there is something to predict.

Labels follow the Hugging Face convention: not shifted, -100 where nothing is trained. Position t predicts token
t + 1, so the trained positions are those whose *next* label is a token. They are found on the host, so that picking
them on the device needs no wait, and logits are computed there only.

On a GPU a batch crosses on a stream of its own. The host is usually far ahead of the kernels, so it has long arrived
when they come to it; queued behind them, it would wait there for the upload of weights that is under way by then.
"""

from dataclasses import dataclass
from functools import cache

import torch

Batch = dict[str, torch.Tensor]


@dataclass
class DeviceBatch:
    """Inputs of the decoder, and for the N trained tokens their positions, targets and rows of the batch."""

    inputs: dict[str, torch.Tensor]
    index_N: torch.Tensor  # into the flattened [B * T] positions
    target_N: torch.Tensor
    row_N: torch.Tensor
    row_count: int
    token_count: int  # N, known on the host


def as_list(batch: Batch | list[Batch]) -> list[Batch]:
    """A step takes one batch or the list of its micro-batches."""
    return [batch] if isinstance(batch, dict) else list(batch)


def to_device(batch: Batch, device: torch.device) -> DeviceBatch:
    labels_BT = batch["labels"]
    next_BT = torch.full_like(labels_BT, -100)
    next_BT[:, :-1] = labels_BT[:, 1:]
    flat = next_BT.flatten()
    index_N = (flat != -100).nonzero()[:, 0]
    inputs = {"input_ids": batch["input_ids"]}
    mask = batch.get("attention_mask")
    if mask is not None and not bool(mask.all()):  # an all-ones mask says nothing, and costs kernels
        inputs["attention_mask"] = mask
    if "position_ids" in batch:
        inputs["position_ids"] = batch["position_ids"]
    return DeviceBatch(
        inputs={name: _move(x, device) for name, x in inputs.items()},
        index_N=_move(index_N, device),
        target_N=_move(flat[index_N], device),
        row_N=_move(index_N // labels_BT.shape[1], device),
        row_count=labels_BT.shape[0],
        token_count=index_N.numel(),
    )


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """For batches on their way to this device."""
    return torch.cuda.Stream(device)


def _move(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    stream, kernels = _stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        moved = x.pin_memory().to(device, non_blocking=True)
    kernels.wait_stream(stream)
    moved.record_stream(kernels)
    return moved
