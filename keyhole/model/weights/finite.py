"""Looks for NaN and infinity before weights are written: reading memory costs little beside writing to disk, and the
last checkpoint is then a good one."""

from collections.abc import Iterable

import torch


def first_bad_tensor(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the first tensor with a NaN or an infinity; None when all are finite. Takes no memory."""
    for name, tensor in tensors:
        if tensor.numel() and tensor.is_floating_point():
            low, high = torch.aminmax(tensor)  # either is NaN if any element is
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return name
    return None
