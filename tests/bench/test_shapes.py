"""Shapes: the right number of parameters, without memory, and as many blocks as host memory holds."""

from typing import Any

import pytest
import torch

from keyhole.bench.shapes import (
    BLOCKS,
    HOST_FACTOR,
    HOST_SLACK_BYTES,
    fitting_blocks,
    model_config,
    parameter_count,
)
from keyhole.machine.sizes import GIB
from keyhole.model.structure.skeleton import build

PUBLISHED = {
    "125M": 125e6,
    "350M": 331e6,
    "1.3B": 1.316e9,
    "2.7B": 2.65e9,
    "6.7B": 6.66e9,
    "13B": 12.85e9,
    "30B": 29.97e9,
    "66B": 65.7e9,
    "175B": 174.6e9,
    "BLOOM-176B": 176.25e9,
}


def counted(config: Any) -> int:
    """On the module itself, built without its matrices."""
    return sum(p.numel() for p in build(config, torch.bfloat16).parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    """Counted on modules of one block and of two, which say what a block more is, and by the formula."""
    one, two = (counted(model_config(name, blocks=blocks)) for blocks in (1, 2))
    count = one + (model_config(name).num_hidden_layers - 1) * (two - one)
    assert abs(count / PUBLISHED[name] - 1) < 0.02
    if name != "350M":
        assert count == parameter_count(name)


@pytest.mark.parametrize("name", ["13B", "175B", "BLOOM-176B"])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("host_gib", [16, 40, 100, 800])
def test_the_cut_is_the_most_that_fits(name: str, element_bytes: int, host_gib: int) -> None:
    """One block more would not fit; a model that fits is not cut, and two blocks always run."""
    blocks = fitting_blocks(name, element_bytes, host_gib * GIB)

    def needed(count: int | None) -> float:
        return HOST_FACTOR * element_bytes * parameter_count(name, count) + HOST_SLACK_BYTES

    if blocks is None:
        assert needed(None) <= host_gib * GIB
        return
    assert 2 <= blocks < BLOCKS[name] and needed(blocks + 1) > host_gib * GIB
    assert blocks == 2 or needed(blocks) <= host_gib * GIB
