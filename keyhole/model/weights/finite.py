"""Checks weights for NaN and infinity before they are written: reading memory costs little beside writing to disk, and
the last checkpoint is then always good."""

from collections.abc import Iterable

import torch


def first_bad_tensor(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the first tensor with a NaN or an infinity; None if all are finite. Allocates no memory."""
    for name, tensor in tensors:
        if tensor.numel() and tensor.is_floating_point():
            low, high = torch.aminmax(tensor)  # either is NaN if any element is
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return name
    return None
