"""Configs of true shape by name, without a download: OPT from 125M to 175B, and Llama.

    OPT     layers x (12 H^2 + 13 H) + (vocabulary + positions + 2) x H + 2 H parameters         H: width

(4 H^2 of a block are attention, 8 H^2 the MLP of width 4 H; the head is tied to the embedding.) 350M is odd: its
embedding is 512 wide, projected to 1024, and its norms stand behind the sublayers.

`blocks` keeps the width and drops blocks, for a model that host memory cannot hold. GPU memory of a streamed step does
not depend on the number of blocks (but for their norms), so it carries over; seconds do not, and are never scaled.
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
LLAMA_VOCABULARY = 32000
LLAMA = {  # width, blocks, heads, width of the MLP
    "3.5B": (4096, 16, 32, 11008),
    "7B": (4096, 32, 32, 11008),
    "30B": (6656, 60, 52, 17920),
}
LLAMA_QUICK = (64, 3, 4, 160)


def opt_config(name: str, length: int = POSITIONS, blocks: int | None = None, quick: bool = False) -> Any:
    """The OPTConfig of a size; positions suffice for `length`. quick: the same kind of model, tiny."""
    from transformers import OPTConfig

    width, layers, heads = QUICK if quick else SHAPES[name]
    odd = name == "350M" and not quick
    return OPTConfig(
        hidden_size=width,
        num_hidden_layers=min(layers, blocks or layers),
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


def parameter_count(name: str, blocks: int | None = None) -> int:
    """Parameters of an OPT by the formula above (350M as if it were a regular one)."""
    width, layers, _ = SHAPES[name]
    layers = min(layers, blocks or layers)
    return layers * (12 * width**2 + 13 * width) + (VOCABULARY + POSITIONS + 2) * width + 2 * width


def llama_config(name: str, quick: bool = False) -> Any:
    """The LlamaConfig of a size. quick: the same kind of model, tiny."""
    from transformers import LlamaConfig

    width, blocks, heads, mlp = LLAMA_QUICK if quick else LLAMA[name]
    return LlamaConfig(
        hidden_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        intermediate_size=mlp,
        vocab_size=QUICK_VOCABULARY if quick else LLAMA_VOCABULARY,
        max_position_embeddings=2048,
    )
