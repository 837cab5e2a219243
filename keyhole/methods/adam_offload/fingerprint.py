"""A few numbers by which changed weights are told from unchanged ones, without a copy of them.

The bits of the weights are read as 64-bit integers, in rows of WIDTH, and every row is summed (modulo 2^64). Another
value changes its sum, and so does an exchange of two weights, unless both are in one row and in the same place of their
integers. Bytes: each weight is read once, at the rate of memory; 1 / WIDTH of their bytes is kept, where the weights
are.
"""

import torch

WIDTH = 256


@torch.no_grad()
def fingerprint(flat: torch.Tensor) -> torch.Tensor:
    """Equal for equal weights."""
    flat, row = flat.detach(), WIDTH * 8 // flat.element_size()
    if flat.storage_offset() * flat.element_size() % 8:  # not where an integer may begin
        flat = flat.clone()
    whole = flat.numel() // row * row
    rest = flat[whole:].contiguous().view(torch.uint8).long()
    return torch.cat([flat[:whole].view(torch.int64).view(-1, WIDTH).sum(dim=1), rest])
