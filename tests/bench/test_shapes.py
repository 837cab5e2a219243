"""OPT shapes: the right number of parameters, without memory."""

import pytest
import torch

from keyhole.bench.shapes import SHAPES, opt_config, parameter_count
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
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    """Counted on the module itself, built without its matrices, and by the formula."""
    count = sum(p.numel() for p in build(opt_config(name), torch.bfloat16).parameters())
    assert abs(count / PUBLISHED[name] - 1) < 0.02
    if name != "350M":
        assert count == parameter_count(name)


def test_positions_suffice_and_dropout_is_off() -> None:
    """Long sequences get more positions; nothing random happens in a forward pass."""
    config = opt_config("125M", length=8192)
    assert config.max_position_embeddings == 8192
    assert config.dropout == config.attention_dropout == config.layerdrop == 0.0
    assert opt_config("125M", length=128).max_position_embeddings == 2048


def test_fewer_blocks_keep_the_width() -> None:
    """A smaller number of blocks, never a larger one."""
    config = opt_config("175B", blocks=4)
    assert (config.num_hidden_layers, config.hidden_size, config.ffn_dim) == (4, 12288, 49152)
    assert opt_config("1.3B", blocks=99).num_hidden_layers == 24
