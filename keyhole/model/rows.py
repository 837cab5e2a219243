"""Rows that are computed together, instead of each by itself. row_rules.py tests which of it a model allows.

**Shared**: candidates that differ in their last token share a row, in passes without a backward pass (a gradient would
have to add up the targets of a position in a fixed order). A choice between " terrible" and " great" is two rows:

    x_1 ... x_n terrible        hidden state n predicts "terrible"
    x_1 ... x_n great           hidden state n predicts "great": the same state, since position n sees tokens 1 .. n

The last trained token of a row is only predicted, never read by a position that counts. So neighbouring rows that are
equal before it need one pass: one row stays, and its position n has several targets. Tasks whose answers are one token
(SST-2, RTE, BoolQ, CB) have half or a third of the rows. If the batch says which question a row belongs to, only its
candidates share, even if two questions are equal: a run's batches then have as many shapes as before, each of which is
captured as a graph once.

**Joined**: the prompts of a task differ in length (SST-2: 15 tokens on average, 50 for the longest of 128), and every
row of a batch is as long as the longest: three quarters of the tokens are padding. So rows are put behind each other,
each with positions from 0:

    a a a a a - - -            a a a a a b b .        a, b, c: the tokens before the last trained one of a row; that
    b b - - - - - -     ->     c c c c . . . .        one is only predicted. -: padding
    c c c c - - - -            . . . . . . . .        .: filled up, by samples that no one reads

    W    64, 128 or 256, the first that the longest row fits into; for longer rows the width of the batch
    R    the number of joined rows, rounded up to one of four numbers per doubling (4 5 6 7, 8 10 12 14, 16 20 24 28 ..)

Both are coarse because every shape of a batch is captured as a CUDA graph of its own. Rows are joined if R W is at most
WORTH of the tokens before. The decision depends on the batch alone: streamed and resident steps, and all ranks, make
the same one. Not joined: batches with positions of their own, or on a GPU, where looking at them would synchronize;
masks that hide a token before the last trained one; rows of more tokens, before or after, than the model has positions
or computes with one rotary embedding (longrope and dynamic: the largest position of a batch, be it padding, decides
about all of its rows), or than its sparse attention reads.

**Packed**: the caller has put samples into one row, with `position_ids` that begin at 0 in every sample. Hugging Face
models that pass position_ids to their mask function detect the jumps and make attention block-diagonal. They look for
jumps only if there is no mask, so the mask of a packed batch is dropped: the padding at the end of a row gets positions
of its own, as one more sample that no other token attends to.

Losses are those of separate rows, up to the rounding of products of other shapes.
Legend: B rows of a batch, K rows that need a pass, T positions, N trained tokens, W tokens and R number of joined rows.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from keyhole.errors import UserError
from keyhole.model.structure.config_files import POSITIONS, setting

IGNORED = -100
WIDTHS = (64, 128, 256)
WORTH = 0.75
SPARSE = ("attention_chunk_size", "index_topk", "index_block_size")  # tokens of a row that are surely all read


def pack(lengths: list[int], max_length: int) -> list[list[int]]:
    """Rows of sample indices, each of at most max_length tokens; every sample is in exactly one, and none is cut. The
    longest first, each into the fullest row where it still fits: never more than 11/9 of the fewest rows, plus one."""
    rows: list[list[int]] = []
    by_space: defaultdict[int, list[int]] = defaultdict(list)  # free tokens -> rows with exactly this much room
    spaces: list[int] = []  # of which there are rows, sorted
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[i] <= max_length, "samples are cut or dropped before they are packed"
        at = bisect_left(spaces, lengths[i])
        if at == len(spaces):
            row, space = len(rows), max_length
            rows.append([])
        else:
            space = spaces[at]
            row = by_space[space].pop()
            if not by_space[space]:
                del spaces[at]
        rows[row].append(i)
        if left := space - lengths[i]:
            if not by_space[left]:
                insort(spaces, left)
            by_space[left].append(row)
    return rows


def find_shared(batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(rows that stay [K], for every row the place among them of the one that stands for it [B]): a row that agrees
    with the row before it goes. None if all stay, or a part of the batch is on a GPU, where looking at it would
    synchronize."""
    ids_BT, question_B = batch["input_ids"], batch.get("question")
    if "position_ids" in batch or not is_on_host(batch):
        return None
    columns_T = torch.arange(ids_BT.shape[1])
    last_B = torch.where(batch["labels"] != IGNORED, columns_T, 0).amax(dim=1)
    agree_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    for x_BT in (ids_BT, batch.get("attention_mask")):
        if x_BT is not None:
            agree_BT[1:] &= x_BT[1:] == x_BT[:-1]
    agree_BT |= columns_T >= last_B[:, None]  # the last trained token, and what follows it
    goes_B = agree_BT.all(dim=1)
    goes_B[1:] &= last_B[1:] == last_B[:-1]
    if question_B is not None:
        goes_B[1:] &= question_B[1:] == question_B[:-1]
    goes_B[0] = False
    return ((~goes_B).nonzero()[:, 0], (~goes_B).cumsum(0) - 1) if bool(goes_B.any()) else None


def is_on_host(batch: Mapping[str, torch.Tensor]) -> bool:
    """Whether all of the batch can be looked at."""
    return all(x.device.type == "cpu" for x in batch.values())


class Joined(NamedTuple):
    """Joined rows: their tokens and positions [R, W], and the flattened position at which each of the K rows begins."""

    ids_RW: torch.Tensor
    positions_RW: torch.Tensor
    begin_K: torch.Tensor


def longest_row(config: Any) -> int:
    """The most tokens that a row of this model may have, before it is joined and after."""
    text = config.get_text_config()
    limits = [setting(text, name) for name in (*POSITIONS, *SPARSE)]
    rope = setting(text, "rope_parameters") or {}
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
    place_M = torch.repeat_interleave(begins, length_K) + torch.arange(int(length_K.sum()))
    place_M -= torch.repeat_interleave(length_K.cumsum(0) - length_K, length_K)
    ids = torch.zeros(count * width, dtype=ids_KT.dtype)
    ids[place_M] = ids_KT[needed_KT]
    start = torch.zeros(count * width, dtype=torch.int64)  # of the sample that a position belongs to
    for first in (begins, ends[ends < torch.arange(1, count + 1) * width]):
        start[first] = first
    positions = (torch.arange(count * width) - start.cummax(dim=0).values) % longest  # none beyond those of the batch
    return Joined(ids.view(count, width), positions.view(count, width), begins)


def _rounded(count: int) -> int:
    """The next of four numbers per doubling."""
    step = max(1, (1 << count.bit_length()) // 8)
    return -(-count // step) * step


def is_packed(position_ids_BT: torch.Tensor, mask_BT: torch.Tensor | None) -> bool:
    """Whether positions jump between two neighbouring tokens of a row that are both unmasked."""
    jumps_BT = position_ids_BT[:, 1:] - position_ids_BT[:, :-1] != 1
    if mask_BT is not None:
        jumps_BT = jumps_BT & mask_BT[:, 1:].bool() & mask_BT[:, :-1].bool()
    return bool(jumps_BT.any())


def separate(position_ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Position ids that replace the mask of a packed batch: the padding after the last token becomes a sample."""
    mask_BT = mask_BT.bool()
    if bool((~mask_BT[:, :-1] & mask_BT[:, 1:]).any()):
        raise UserError(
            "batch: attention_mask hides tokens before the end of a row whose position_ids restart (packed samples); "
            "pad packed rows at their end, or leave such tokens out"
        )
    padding_BT = torch.cumsum(~mask_BT, dim=1) - 1
    return torch.where(mask_BT, position_ids_BT, padding_BT.to(position_ids_BT.dtype))
