"""Configs of true shape by name, without a download: OPT from 125M to 175B, BLOOM-176B, Llama, and a GPT-2 of 1.3B.

    OPT     layers x (12 H^2 + 13 H) + (vocabulary + positions + 2) x H + 2 H parameters         H: width
    BLOOM   layers x (12 H^2 + 13 H) + vocabulary x H + 4 H

(4 H^2 of a block are attention, 8 H^2 the MLP of width 4 H; the head is tied to the embedding.) 350M is an
exception: its embedding is 512 wide, projected to 1024, and its norms follow the sublayers.

`blocks` keeps the width and drops blocks, for a model that does not fit host memory. GPU memory of a streamed step does
not depend on the number of blocks (except for their norms), so it holds for the whole model; seconds are never scaled.
"""

from typing import Any

from keyhole.errors import UserError

POSITIONS = 2048
SHAPES = {  # OPT: width, blocks, heads
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
BLOOM = {"BLOOM-176B": (14336, 70, 112)}
GPT2 = {"GPT2-1.3B": (1600, 40, 25)}
LLAMA = {  # width, blocks, heads, heads of keys, width of the MLP, vocabulary
    "3.5B": (4096, 16, 32, 32, 11008, 32000),
    "7B": (4096, 32, 32, 32, 11008, 32000),
    "8B": (4096, 32, 32, 8, 14336, 128256),
    "30B": (6656, 60, 52, 52, 17920, 32000),
}
BLOCKS = {name: shape[1] for name, shape in (SHAPES | BLOOM | GPT2).items()}  # of every model, by its name
BLOCKS |= {f"Llama-{size}": shape[1] for size, shape in LLAMA.items()}
VOCABULARY, BLOOM_VOCABULARY, GPT2_VOCABULARY = 50272, 250880, 50257
QUICK, LLAMA_QUICK, QUICK_VOCABULARY = (32, 3, 2), (64, 3, 4, 4, 160, 128), 128
QUICK_SHRINK = 128  # factor for sequence lengths
LEAST_BLOCKS = 2  # a single block would not be recognised as a list of blocks


def known(name: str, option: str = "--models") -> str:
    """The name of a model here; OPT may be said before it (OPT-13B)."""
    found = name.removeprefix("OPT-")
    if found not in BLOCKS:
        raise UserError(f"{option}: {name!r} is not one of {', '.join(BLOCKS)}")
    return found


def opt_config(name: str, length: int = POSITIONS, blocks: int | None = None, quick: bool = False) -> Any:
    """The OPTConfig of a size; with enough positions for `length`. quick: the same kind of model, tiny."""
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


def llama_config(name: str, quick: bool = False, blocks: int | None = None) -> Any:
    """The LlamaConfig of a size. quick: the same kind of model, tiny."""
    from transformers import LlamaConfig

    width, layers, heads, keys, mlp, words = LLAMA_QUICK if quick else LLAMA[name]
    return LlamaConfig(
        hidden_size=width,
        num_hidden_layers=min(layers, blocks or layers),
        num_attention_heads=heads,
        num_key_value_heads=keys,
        intermediate_size=mlp,
        vocab_size=words,
        max_position_embeddings=POSITIONS,
    )


def model_config(name: str, length: int = POSITIONS, blocks: int | None = None, quick: bool = False) -> Any:
    """The config of any model. BLOOM's positions are attention biases, so any length works."""
    from transformers import BloomConfig, GPT2Config

    if name.startswith("Llama-"):
        return llama_config(name.removeprefix("Llama-"), quick, blocks)
    if name in SHAPES:
        return opt_config(name, length, blocks, quick)
    width, layers, heads = QUICK if quick else (BLOOM | GPT2)[name]
    layers, words = min(layers, blocks or layers), BLOOM_VOCABULARY if name in BLOOM else GPT2_VOCABULARY
    shape = {"n_layer": layers, "n_head": heads, "vocab_size": QUICK_VOCABULARY if quick else words}
    if name in BLOOM:
        return BloomConfig(hidden_size=width, hidden_dropout=0.0, attention_dropout=0.0, **shape)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return GPT2Config(n_embd=width, n_positions=POSITIONS, **shape, **off)
