"""Short rows are put behind each other in longer ones, so that a batch has less padding: for passes of candidates.

The prompts of a task differ in length (SST-2: 15 tokens on average, 50 for the longest of 128), and every row of a
batch is as long as the longest: three quarters of the tokens are padding, which costs as much as tokens do. So rows are
packed: as many into a row of W tokens as fit, the longest first (best_fit.py), each with positions from 0, by which the
model keeps them apart (packing.py; apart.py tests the model itself, and rows of models that fail are not joined).

    a a a a a - - -            a a a a a b b .        a, b, c: the tokens before the last trained one of a row; that
    b b - - - - - -     ->     c c c c . . . .        one is only predicted. -: padding
    c c c c - - - -            . . . . . . . .        .: filled up, by samples that no one reads

    W    64, 128 or 256, the first that the longest row fits into; for longer rows the width of the batch
    R    the number of joined rows, rounded up to one of four numbers per doubling (4 5 6 7, 8 10 12 14, 16 20 24 28 ..)

Both are coarse because every shape of a batch is captured as a CUDA graph of its own (methods/zo/recorded_step.py): 128
questions of SST-2 have one or two shapes. Rows are joined if R W is at most WORTH of the tokens before. What a row is
predicted from does not change, so losses are those of separate rows, up to the rounding of products with other shapes.
The decision depends on the batch alone: streamed and resident steps, and all ranks, make the same one.

Not joined: batches with positions of their own, or on a GPU, where looking at them would synchronize; masks that hide a
token before the last trained one; models in which joined rows would see each other; rows of more tokens, before or
after, than the model has positions or computes with one rotary embedding (longrope and dynamic: the largest position of
a batch, be it padding, decides about all of its rows), or than its sparse attention reads (by blocks that are counted
in the row, or with ties that are broken by the place in the row).
Legend: B rows of a batch, K rows that need a pass (shared_rows.py), T positions, N trained tokens.
"""

from typing import Any, NamedTuple

import torch

from keyhole.model.best_fit import pack
from keyhole.model.structure.config_file import POSITIONS

WIDTHS = (64, 128, 256)
WORTH = 0.75
SPARSE = ("attention_chunk_size", "index_topk", "index_block_size")  # tokens of a row that are surely all read


class Joined(NamedTuple):
    """Joined rows: their tokens and positions [R, W], and the flattened position at which each of the K rows begins."""

    ids_RW: torch.Tensor
    positions_RW: torch.Tensor
    begin_K: torch.Tensor


def longest_row(config: Any) -> int:
    """The most tokens that a row of this model may have, before it is joined and after."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limits = [getattr(text, name, None) for name in (*POSITIONS, *SPARSE)]
    rope = getattr(text, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):  # of all layers, or of each kind of layer
        limits += [one.get("original_max_position_embeddings")] if isinstance(one, dict) else []
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=WIDTHS[-1])


def join(ids_KT: torch.Tensor, mask_KT: torch.Tensor | None, length_K: torch.Tensor, most: int) -> Joined | None:
    """Rows of which only the first length_K tokens are needed, joined into rows of at most `most` tokens; None if one
    of these tokens is hidden by the mask, or if joining saves too little."""
    lengths, longest = length_K.tolist(), int(length_K.max())
    width = next((w for w in WIDTHS if w >= longest), ids_KT.shape[1])
    needed_KT = torch.arange(ids_KT.shape[1]) < length_K[:, None]
    if max(width, ids_KT.shape[1]) > most or (mask_KT is not None and not bool(mask_KT[needed_KT].all())):
        return None
    rows = pack(lengths, width)
    count = _rounded(len(rows))
    if count * width > WORTH * ids_KT.numel():
        return None
    begin, end = [0] * len(lengths), [r * width for r in range(count)]  # lists: a tensor's elements one by one are slow
    for r, members in enumerate(rows):
        for k in members:
            begin[k] = end[r]
            end[r] += lengths[k]
    begins, ends = torch.tensor(begin), torch.tensor(end)
    place_M = torch.repeat_interleave(begins, length_K) + _within(length_K)
    ids = torch.zeros(count * width, dtype=ids_KT.dtype)
    ids[place_M] = ids_KT[needed_KT]
    start = torch.zeros(count * width, dtype=torch.int64)  # of the sample that a position belongs to
    for first in (begins, ends[ends < torch.arange(1, count + 1) * width]):
        start[first] = first
    positions = (torch.arange(count * width) - start.cummax(dim=0).values) % longest  # none beyond those of the batch
    return Joined(ids.view(count, width), positions.view(count, width), begins)


def _within(length_K: torch.Tensor) -> torch.Tensor:
    """0, 1, 2, ... for each of K lengths, one list behind the other."""
    before_K = length_K.cumsum(0) - length_K
    return torch.arange(int(length_K.sum())) - torch.repeat_interleave(before_K, length_K)


def _rounded(count: int) -> int:
    """The next of four numbers per doubling."""
    step = max(1, (1 << count.bit_length()) // 8)
    return -(-count // step) * step
