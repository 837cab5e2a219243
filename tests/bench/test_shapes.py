"""Shapes: the right number of parameters, without memory."""

from typing import Any

import pytest
import torch

from keyhole.bench.shapes import model_config
from keyhole.model.structure.skeleton import build

PUBLISHED = {
    "125M": 125e6, "350M": 331e6, "1.3B": 1.316e9, "2.7B": 2.65e9, "6.7B": 6.66e9, "13B": 12.85e9, "30B": 29.97e9,
    "66B": 65.7e9, "175B": 174.6e9, "BLOOM-176B": 176.25e9,
}  # fmt: skip


def counted(config: Any) -> int:
    """On the module itself, built without its matrices."""
    return sum(p.numel() for p in build(config, torch.bfloat16).parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    """Counted on modules of one block and of two, which say what a block more is."""
    one, two = (counted(model_config(name, blocks=blocks)) for blocks in (1, 2))
    count = one + (model_config(name).num_hidden_layers - 1) * (two - one)
    assert abs(count / PUBLISHED[name] - 1) < 0.02
