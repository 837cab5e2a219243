"""OPT configs by name, from 125M to 175B: true shapes, no download.

    parameters = layers x (12 H^2 + 13 H) + (vocabulary + positions + 2) x H + 2 H         H: width

(4 H^2 of a block are attention, 8 H^2 the MLP of width 4H; the head is tied to the embedding.) 350M is odd:
its embedding is 512 wide, projected to 1024, and its norms stand behind the sublayers.

`fewer_blocks` keeps the width and drops blocks, for a model that host memory cannot hold. GPU memory of a
streamed step does not depend on the number of blocks (but for their norms), so it carries over; seconds do
not, and are never scaled.
"""

from typing import Any

VOCABULARY = 50272
POSITIONS = 2048
SHAPES = {  # width, blocks, heads
    "125M": (768, 12, 12),
    "350M": (1024, 24, 16),
    "1.3B": (2048, 24, 32),
    "2.7B": (2560, 32, 32),
    "6.7B": (4096, 32, 32),
    "13B": (5120, 40, 40),
    "30B": (7168, 48, 56),
    "66B": (9216, 64, 72),
    "175B": (12288, 96, 96),
}
QUICK = (32, 3, 2)
QUICK_VOCABULARY = 128
QUICK_SHRINK = 128  # of sequences


def opt_config(name: str, length: int = POSITIONS, blocks: int | None = None, quick: bool = False) -> Any:
    """The OPTConfig of a size; positions suffice for `length`. quick: the same kind of model, tiny."""
    from transformers import OPTConfig

    width, layers, heads = QUICK if quick else SHAPES[name]
    odd = name == "350M" and not quick
    config = OPTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        ffn_dim=4 * width,
        vocab_size=QUICK_VOCABULARY if quick else VOCABULARY,
        max_position_embeddings=max(length, POSITIONS) // (QUICK_SHRINK if quick else 1),
        word_embed_proj_dim=512 if odd else width,
        do_layer_norm_before=not odd,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
    )
    return config if blocks is None else fewer_blocks(config, blocks)


def fewer_blocks(config: Any, count: int) -> Any:
    """The same config with at most `count` blocks."""
    config.num_hidden_layers = min(count, config.num_hidden_layers)
    return config


def parameter_count(name: str, blocks: int | None = None) -> int:
    """Parameters by the formula above (350M as if it were a regular one)."""
    width, layers, _ = SHAPES[name]
    layers = min(layers, blocks or layers)
    return layers * (12 * width**2 + 13 * width) + (VOCABULARY + POSITIONS + 2) * width + 2 * width


def blocks_within(name: str, element_bytes: int, limit_bytes: int, few_bytes: int) -> int | None:
    """None when all blocks fit the limit; else the even number of blocks that fits few_bytes."""
    _, layers, _ = SHAPES[name]
    if parameter_count(name) * element_bytes <= limit_bytes:
        return None
    fitting = [n for n in range(2, layers, 2) if parameter_count(name, n) * element_bytes <= few_bytes]
    return max(fitting, default=2)
