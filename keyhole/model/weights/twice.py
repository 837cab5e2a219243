"""Weights that the files hold twice, under both names of a tied tensor.

A tied parameter has one home and two names (`lm_head.weight`, `model.embed_tokens.weight`), and files may store either
or both. If both are there with different values, config.json is wrong about the tie: Transformers 5 loads two separate
tensors, others take the first. Whichever is taken, another model is trained than somebody else runs, so such a
directory is refused. The comparison reads both tensors, and only where both are stored.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from keyhole.disk.weight_files import Stored
from keyhole.errors import UserError
from keyhole.model.structure.layout import Layout


def names_of(module: nn.Module, layout: Layout) -> Iterator[tuple[str, list[str]]]:
    """Each parameter, and all names that files may have for it: with and without the prefix of the decoder."""
    aliases: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(param), []).append(name)
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    for tensor in layout.tensors:
        own = aliases[id(tensor.param)]
        yield tensor.name, [tensor.name, *own, *(n.removeprefix(prefix) for n in own), *(prefix + n for n in own)]


def check_ties(module: nn.Module, layout: Layout, stored: Mapping[str, Stored], directory: Path) -> None:
    """UserError if the files hold different values for one tied parameter."""
    for _, names in names_of(module, layout):
        first, *others = [name for name in dict.fromkeys(names) if name in stored] or [""]
        for other in others:
            read = [stored[name].read(directory, name) for name in (first, other)]
            if read[0].shape != read[1].shape or not torch.equal(*read):
                raise untied(directory, first, other)


def untied(directory: Path, first: str, other: str) -> UserError:
    return UserError(
        f"model: {directory} holds {first} and {other} with different values, but its config.json makes them one "
        "tensor; set tie_word_embeddings to false there if both are meant (Transformers 5 loads it so), or remove one"
    )
