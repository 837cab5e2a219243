"""Candidates that differ in their last token share a row: its hidden states are computed once for all of them.

A choice between " terrible" and " great" is a batch of two rows per question that agree in all tokens but the last:

    x_1 ... x_n terrible        hidden state n predicts "terrible"
    x_1 ... x_n great           hidden state n predicts "great": the same state, since position n sees tokens 1 .. n

The last trained token of a row is only predicted, never read by a position that counts. So rows of a question that are
equal before it need one pass: one row stays, and its position n has several targets. Tasks whose answers are one token
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
    """(rows that stay [K], for every row the place among them of the one that stands for it [B]); None if no row is
    spared, or the batch is on a GPU, where looking at it would synchronize."""
    ids_BT, question_B = batch["input_ids"], batch.get(PER_ROW[0])
    if ids_BT.device.type != "cpu" or "position_ids" in batch:
        return None
    trained_BT = batch["labels"] != IGNORED
    columns_T = torch.arange(ids_BT.shape[1])
    last_B = torch.where(trained_BT, columns_T, -1).amax(dim=1).tolist()
    mask_BT = batch.get("attention_mask")
    ids, questions = ids_BT.numpy(), [0] * len(ids_BT) if question_B is None else question_B.tolist()
    mask = None if mask_BT is None else mask_BT.numpy()
    known: dict[tuple[int, bytes, bytes], int] = {}
    stays: list[int] = []
    place: list[int] = []
    for row, last in enumerate(last_B):
        seen = b"" if mask is None else mask[row, :last].tobytes()
        key = questions[row], ids[row, :last].tobytes(), seen
        if key not in known:
            known[key] = len(stays)
            stays.append(row)
        place.append(known[key])
    return None if len(stays) == len(place) else (torch.tensor(stays), torch.tensor(place))
