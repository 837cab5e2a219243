"""Configs of true shape by name, without a download: OPT from 125M to 175B, BLOOM-176B, Llama, and a GPT-2 of 1.3B.

    OPT     layers x (12 H^2 + 13 H) + (vocabulary + positions + 2) x H + 2 H parameters         H: width
    BLOOM   layers x (12 H^2 + 13 H) + vocabulary x H + 4 H

(4 H^2 of a block are attention, 8 H^2 the MLP of width 4 H; the head is tied to the embedding.) 350M is an
exception: its embedding is 512 wide, projected to 1024, and its norms follow the sublayers.

`blocks` keeps the width and drops blocks, for a model that does not fit host memory; `fitting_blocks` returns how many
blocks fit. GPU memory of a streamed step does not depend on the number of blocks (except for their norms), so it holds
for the whole model; seconds do not, and are never scaled.
"""

from typing import Any

from keyhole.errors import UserError
from keyhole.machine.sizes import GIB

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
BLOOM = {"BLOOM-176B": (14336, 70, 112)}
BLOOM_VOCABULARY = 250880
GPT2 = {"GPT2-1.3B": (1600, 40, 25)}
GPT2_VOCABULARY = 50257
MODELS = SHAPES | BLOOM  # those of zeroth-order tables
QUICK = (32, 3, 2)
QUICK_VOCABULARY = 128
QUICK_SHRINK = 128  # factor for sequence lengths
LLAMA_VOCABULARY = 32000
LLAMA = {  # width, blocks, heads, width of the MLP
    "3.5B": (4096, 16, 32, 11008),
    "7B": (4096, 32, 32, 11008),
    "30B": (6656, 60, 52, 17920),
}
LLAMA_QUICK = (64, 3, 4, 160)
LEAST_BLOCKS = 2  # a single block would not be recognised as a list of blocks
HOST_FACTOR, HOST_SLACK_BYTES = 1.05, 4 * GIB  # host memory of a streamed run: factor x weights + slack


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


def bloom_config(name: str, blocks: int | None = None, quick: bool = False) -> Any:
    """The BloomConfig of a size. Its positions are attention biases, so any length works."""
    from transformers import BloomConfig

    width, layers, heads = QUICK if quick else BLOOM[name]
    return BloomConfig(
        hidden_size=width,
        n_layer=min(layers, blocks or layers),
        n_head=heads,
        vocab_size=QUICK_VOCABULARY if quick else BLOOM_VOCABULARY,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def model_config(name: str, length: int = POSITIONS, blocks: int | None = None, quick: bool = False) -> Any:
    """The config of one of MODELS."""
    return bloom_config(name, blocks, quick) if name in BLOOM else opt_config(name, length, blocks, quick)


def parameter_count(name: str, blocks: int | None = None) -> int:
    """Parameters of one of MODELS by the formulas above (350M as if it were regular)."""
    width, layers, _ = MODELS[name]
    layers = min(layers, blocks or layers)
    rows = BLOOM_VOCABULARY + 2 if name in BLOOM else VOCABULARY + POSITIONS + 2
    return layers * (12 * width**2 + 13 * width) + rows * width + 2 * width


def fitting_blocks(name: str, element_bytes: int, host_bytes: int) -> int | None:
    """How many blocks of one of MODELS fit this much host memory, at least LEAST_BLOCKS; None: all of them."""
    layers = MODELS[name][1]
    rest = parameter_count(name, 1) - (block := parameter_count(name, 2) - parameter_count(name, 1))
    room = (host_bytes - HOST_SLACK_BYTES) / HOST_FACTOR / element_bytes
    count = int((room - rest) // block)
    return None if count >= layers else max(LEAST_BLOCKS, count)


def gpt2_config(name: str, blocks: int | None = None, quick: bool = False) -> Any:
    """The GPT2Config of a size. quick: the same kind of model, tiny."""
    from transformers import GPT2Config

    width, layers, heads = QUICK if quick else GPT2[name]
    layers = min(layers, blocks or layers)
    vocabulary = QUICK_VOCABULARY if quick else GPT2_VOCABULARY
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return GPT2Config(n_embd=width, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=2048, **off)


def llama_config(name: str, quick: bool = False, blocks: int | None = None) -> Any:
    """The LlamaConfig of a size. quick: the same kind of model, tiny."""
    from transformers import LlamaConfig

    width, layers, heads, mlp = LLAMA_QUICK if quick else LLAMA[name]
    return LlamaConfig(
        hidden_size=width,
        num_hidden_layers=min(layers, blocks or layers),
        num_attention_heads=heads,
        intermediate_size=mlp,
        vocab_size=QUICK_VOCABULARY if quick else LLAMA_VOCABULARY,
        max_position_embeddings=2048,
    )


def named(family_and_size: str) -> tuple[str, int]:
    """A model of any family by its full name (OPT-13B, Llama-7B, GPT2-1.3B, BLOOM-176B): its name here, and its number
    of blocks."""
    full = {f"OPT-{size}": (size, shape) for size, shape in SHAPES.items()}
    full |= {f"Llama-{size}": (size, shape[:3]) for size, shape in LLAMA.items()}
    full |= {name: (name, shape) for name, shape in (GPT2 | BLOOM).items()}
    if family_and_size not in full:
        raise UserError(f"--models: {family_and_size!r} is not one of {', '.join(full)}")
    name, shape = full[family_and_size]
    return name, shape[1]


def named_config(family_and_size: str, blocks: int | None = None, quick: bool = False) -> Any:
    """The config of such a model."""
    name, _ = named(family_and_size)
    if family_and_size in GPT2:
        return gpt2_config(name, blocks, quick)
    if family_and_size.startswith("Llama-"):
        return llama_config(name, quick, blocks)
    return model_config(name, blocks=blocks, quick=quick)
