"""Candidates that differ in their last token share a row: its hidden states are computed once for all of them.

A choice between " terrible" and " great" is a batch of two rows per question that agree in all tokens but the last:

    x_1 ... x_n terrible        hidden state n predicts "terrible"
    x_1 ... x_n great           hidden state n predicts "great": the same state, since position n sees tokens 1 .. n

The last trained token of a row is only predicted, never read by a position that counts, if a position sees what came
before it and nothing else: the model is tested for that first (causality.py). So neighbouring rows that are equal
before it need one pass: one row stays, and its position n has several targets. Tasks whose answers are one token
(SST-2, RTE, BoolQ, CB) have half or a third of the rows; others stay as they are. Losses are those of separate rows, up
to the rounding of products with fewer rows.

If the batch says which question a row belongs to, only its candidates share, even if two questions are equal: the
batches of a run then have as many shapes as before, each of which is captured as a graph once. Only for passes without
a backward pass: a gradient would have to add up the targets of a position in a fixed order.
Legend: B rows of a batch, K rows that stay, T positions, N trained tokens.
"""

from collections.abc import Mapping

import torch

from keyhole.model.objective import PER_ROW

IGNORED = -100


def find_shared(batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(rows that stay [K], for every row the place among them of the one that stands for it [B]): a row that agrees
    with the row before it goes. None if all stay, or a part of the batch is on a GPU, where looking at it would
    synchronize."""
    ids_BT, question_B = batch["input_ids"], batch.get(PER_ROW[0])
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
