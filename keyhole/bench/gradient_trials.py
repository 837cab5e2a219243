"""What `keyhole bench lomo` and `keyhole bench lsp` run: a trial a line, on Llama shapes; lsp.py has the latter's."""

from dataclasses import dataclass, field
from typing import Any

SHAPES = {  # width, blocks, heads, MLP
    "3.5B": (4096, 16, 32, 11008),
    "7B": (4096, 32, 32, 11008),
    "30B": (6656, 60, 52, 17920),
    "quick": (64, 3, 4, 160),
}
VOCABULARY = 32000


@dataclass(frozen=True)
class Trial:
    """One line: a shape, a system, and how it is set up."""

    name: str
    shape: str
    system: str  # native, or a method of keyhole
    batch: int = 4
    length: int = 1024
    gpu_memory: str | None = None  # the budget; None: all of the device
    streamed: bool = False
    compare: str | None = None  # a streamed trial: the resident one whose step is its compute floor
    options: dict[str, Any] = field(default_factory=dict)


HOST = {"activations": "host"}
FAST = {"activations": "host", "compile": True}
LOMO = [
    Trial("7B native sgd", "7B", "native", options={"optimizer": "sgd"}),
    Trial("7B native adamw", "7B", "native", options={"optimizer": "adamw"}),
    Trial("7B lomo compiled", "7B", "lomo", options=FAST),
    Trial("7B lomo compiled streamed 4GiB", "7B", "lomo", gpu_memory="4GiB", streamed=True,
          compare="7B lomo compiled", options=FAST),
    Trial("7B lomo compiled 8x512", "7B", "lomo", batch=8, length=512, options=FAST),
    Trial("7B adalomo compiled", "7B", "adalomo", options=FAST),
    Trial("7B lomo", "7B", "lomo", options=HOST),
    Trial("7B lomo streamed 4GiB", "7B", "lomo", gpu_memory="4GiB", streamed=True, compare="7B lomo", options=HOST),
    Trial("7B lomo 8x512", "7B", "lomo", batch=8, length=512, options=HOST),
    Trial("7B lomo compiled clipped", "7B", "lomo", options=FAST | {"max_grad_norm": 1.0}),
    Trial("7B lomo compiled, inputs on the GPU", "7B", "lomo", options={"compile": True}),
    Trial("30B lomo streamed 16GiB", "30B", "lomo", gpu_memory="16GiB", streamed=True, options=HOST),
]  # fmt: skip


def trials_of(table: str) -> list[Trial]:
    """In the order in which they run."""
    if table == "lsp":
        from keyhole.bench.lsp import TRIALS

        return TRIALS
    return {"lomo": LOMO}[table]


def config_of(shape: str) -> Any:
    """A Llama config of true shape; no download."""
    from transformers import LlamaConfig

    width, blocks, heads, mlp = SHAPES[shape]
    return LlamaConfig(
        hidden_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        intermediate_size=mlp,
        vocab_size=VOCABULARY if shape != "quick" else 128,
        max_position_embeddings=2048,
    )


def product_flop(shape: str, tokens: int) -> float:
    """Of a step with second forwards, as at the top; the head's logits are made twice as well."""
    width, blocks, _, mlp = SHAPES[shape]
    block = 4 * width**2 + 3 * width * mlp
    return tokens * (blocks * (8 * block - 2 * width * mlp) + 8 * VOCABULARY * width)
