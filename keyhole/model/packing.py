"""Samples packed into one row must not attend to each other: how a model is told.

A packed batch has `position_ids` that begin at 0 in every sample, and no attention mask. Hugging Face models that pass
position_ids to their mask function detect the jumps and make attention block-diagonal. That depends on each model's
code, so the model is tested before the first packed batch (apart.py).

A user's packed batch may also have a mask. Models look for jumps only if there is no mask, so the mask of a packed
batch is dropped: `separate` gives the padding at the end of a row its own positions, as one more sample that no other
token attends to.
"""

import torch

from keyhole.errors import UserError


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
