"""The limits of a model: how many positions it has, and how many token ids its embedding has.

Both limits are read from the HF config and compared with the data before the first step. A learned position table of L
rows has no row for token L + 1: the step would end in an IndexError, on a GPU in a device assert without a line number.
Models with rotary embeddings compute any position, so exceeding L only causes a warning: it runs, but the model was not
trained on such positions.

    positions in the config     max_position_embeddings, n_positions (GPT-2) or max_seq_len (MPT)
    a table                     no rope_parameters, and a matrix of L rows (OPT: L + 2) named after positions;
                                the module is built to find it (without memory, skeleton.py), and only if a text is
                                longer than L
    a classifier                its position table, without the rows before the first token (RoBERTa's begin after
                                the one for padding)
    rows of the embedding       vocab_size; a tokenizer may be smaller, or larger with tokens that do not occur, so the
                                ids that occur are compared, not the sizes

Padding counts too. Packed rows are padded with positions from 0 on, up to the longest row of the batch, so with a table
whole rows must fit; and a batch is not padded beyond L (batches.py).
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from keyhole.data.dataset import Dataset
from keyhole.errors import UserError
from keyhole.model.classification import text_positions
from keyhole.model.structure.skeleton import build, is_classifier

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
TABLE_WORDS = ("pos", "wpe")


def context_length(config: "PreTrainedConfig") -> int | None:
    found = (getattr(config.get_text_config(decoder=True), name, None) for name in POSITIONS)
    length = next((length for length in found if isinstance(length, int) and length > 0), None)
    if length is None or not is_classifier(config):
        return length
    return text_positions(build(config, torch.float32)) or length


def has_table(config: "PreTrainedConfig", module: nn.Module | None = None) -> bool:
    """Whether the model cannot compute positions beyond context_length. `module`: the model, if it is already
    loaded."""
    text, length = config.get_text_config(decoder=True), context_length(config)
    if length is None or getattr(text, "rope_parameters", None):
        return False
    if getattr(text, POSITIONS[0], None) is None and getattr(text, "max_seq_len", None):
        return True  # MPT: biases for max_seq_len distances
    module = build(config, torch.float32) if module is None else module
    if is_classifier(config) and text_positions(module):
        return True
    return any(
        tensor.ndim == 2 and length <= len(tensor) <= length + 2 and any(word in name for word in TABLE_WORDS)
        for tensors in (module.named_parameters(), module.named_buffers())
        for name, tensor in tensors
    )


def embedding_rows(config: "PreTrainedConfig") -> int | None:
    return getattr(config.get_text_config(decoder=True), "vocab_size", None)


def check_max_length(max_length: int | None, config: "PreTrainedConfig", module: nn.Module | None = None) -> None:
    length = context_length(config)
    if max_length and length and max_length > length and has_table(config, module):
        raise UserError(
            f"max_length: {max_length} is more than the {length} positions the model has; set it to {length} or less"
        )


def check_ids(ids: "np.ndarray | list[int]", where: str, model: object, config: "PreTrainedConfig") -> None:
    """Refuses tokens that have no row in the embedding. ids: an array or a list, not empty."""
    rows, largest = embedding_rows(config), int(np.max(ids))
    if rows is not None and largest >= rows:
        raise UserError(
            f"model: {model}: {where} has token id {largest}, but the embedding has {rows:,} rows (ids 0 to "
            f"{rows - 1}): the tokenizer has more tokens than the model; resize the embedding to it "
            "(Transformers: model.resize_token_embeddings(len(tokenizer))) and save both, or use the model's own "
            "tokenizer"
        )


def check_data(data: Dataset, model: object, config: "PreTrainedConfig", module: nn.Module | None = None) -> list[str]:
    """Refuses data beyond the model's limits; returns warnings. Ensures that the padding id is valid for the model."""
    at = int(data.ids.argmax())
    check_ids(data.ids[at], data.where[int(np.searchsorted(data.starts, at, side="right")) - 1], model, config)
    if data.pad_token_id >= (embedding_rows(config) or data.pad_token_id + 1):
        data.pad_token_id = 0
    length, row, limit = context_length(config), data.longest_row(), data.report.max_length
    if length is None or row <= length:
        return []
    longest = int(np.argmax(data.lengths))
    sample = data.lengths[longest]
    if has_table(config, module):
        found = f"packed rows have up to {row:,}" if data.packed else f"{data.where[longest]} has {sample:,}"
        raise UserError(
            f"max_length: {limit or 'null (no limit)'} is more than the {length} positions the model has ({model}), "
            f"and {found} tokens; set max_length={length} or less, then longer samples are cut, dropped or refused, as "
            "overlong says"
        )
    if sample <= length:
        return []
    return [
        f"warning: the longest sample has {sample:,} tokens, the model is made for {length:,} (max_position_embeddings "
        f"in its config); it runs, but beyond what the model has seen; max_length={length} cuts there"
    ]
