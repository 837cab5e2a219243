"""A few numbers by which changed weights are told from unchanged ones, without a copy of them.

The bits of the weights, as integers, in rows of WIDTH: the sum of every row, and of every column. Another value changes
two sums, and an exchange of two values changes those of two rows or two columns. Bytes: each weight is read twice,
1 / 512 of the weights (in 16 bit) is kept, where the weights are.
"""

import torch

WIDTH = 2048
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(flat: torch.Tensor) -> torch.Tensor:
    """Equal for equal weights."""
    bits = flat.detach().view(BITS[flat.element_size()])
    whole = bits.numel() // WIDTH * WIDTH
    rows = bits[:whole].view(-1, WIDTH)
    return torch.cat([rows.sum(dim=1), rows.sum(dim=0), bits[whole:].long()])
