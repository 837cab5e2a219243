"""Batches of the Trainer's data collator, as keyhole's model takes them."""

from collections.abc import Mapping
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.model.classification import MULTI_LABEL, REGRESSION, problem_of
from keyhole.model.rows import IGNORED

# Redundant for packed samples: position_ids say the same
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
SWITCHES = ("use_cache", "return_dict", "output_attentions", "output_hidden_states")  # they change no loss


def tensors_of(inputs: object) -> dict[str, torch.Tensor]:
    """The inputs of the model; keyhole refuses unknown ones."""
    if not isinstance(inputs, Mapping):
        raise UserError(f"batch: found a {type(inputs).__name__}; data_collator must return a dict of tensors")
    said = PACKED if "position_ids" in inputs else ()
    given = {name: x for name, x in inputs.items() if x is not None and name not in said and name not in SWITCHES}
    if other := [f"{name} is a {type(x).__name__}" for name, x in given.items() if not isinstance(x, torch.Tensor)]:
        raise UserError(f"batch: {', '.join(other)}; data_collator must return tensors, of what the model is given")
    return {name: x.cpu() for name, x in given.items()}


def trains_nothing(batches: list[dict[str, torch.Tensor]]) -> bool:
    """Whether no token of a step of a decoder is trained on: every label is IGNORED, or the first of its row."""
    labels = [batch["labels"] for batch in batches if "labels" in batch and batch["labels"].ndim == 2]
    return len(labels) == len(batches) and all(bool((each[:, 1:] == IGNORED).all()) for each in labels)


def no_labels(config: Any, rows: int) -> torch.Tensor:
    """Labels for rows that have none, in the form that a classifier's loss needs; the loss is not used."""
    problem = problem_of(config)
    if problem == MULTI_LABEL or (problem == REGRESSION and config.num_labels > 1):
        return torch.zeros(rows, config.num_labels)
    return torch.zeros(rows, dtype=torch.long)
