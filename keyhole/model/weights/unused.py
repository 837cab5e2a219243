"""Tensors in a model's files that the model has no parameter for: reported, or refused if they are scales.

A config with fewer layers than the files gives a smaller model, which loads, trains and is saved; a classifier leaves
out the language model's head. Both may be intended, so a line of the start block names the unused tensors. Not named:
second names of a tied tensor, buffers that the module computes itself, and tensors that Transformers ignores too
(`_keys_to_ignore_on_load_unexpected`: layers that predict further tokens, tables of old versions).

A scale beside a weight (`q_proj.weight_scale`, `..._scale_inv`) means that the weight is quantised in a format that is
not supported, whatever config.json says: its codes would be read as numbers.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import nn

from keyhole.errors import UserError

SHOWN = 3
TABLES = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")


def find_unused(module: nn.Module, stored: Iterable[str], names: Mapping[str, str], directory: Path) -> list[str]:
    """Names in the files that the module does not have, sorted. names: name in the module -> name in the files."""
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    known = own | {name.removeprefix(prefix) for name in own} | {prefix + name for name in own} | set(names.values())
    ignored = [re.compile(pattern) for pattern in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()]
    left = sorted(
        name
        for name in stored
        if name not in known and not name.endswith(TABLES) and not any(pattern.search(name) for pattern in ignored)
    )
    used = set(names.values())
    for name in left:
        weight, scale, _ = name.rpartition("_scale")
        if scale and weight in used:
            raise UserError(
                f"model: {directory} holds {name} beside {weight}, which is quantised in a format that is not read "
                "here; dequantize the model first, or fetch it in 16 bits"
            )
    return left


def unused_line(left: list[str]) -> list[str]:
    """A line for the start block, or none."""
    if not left:
        return []
    more = f", and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
    count = f"{len(left)} {'tensor' if len(left) == 1 else 'tensors'} of the files"
    shown = f"{', '.join(left[:SHOWN])}{more}"
    return [f"warning: weights: {count} left out, which this config's model does not have: {shown}"]
