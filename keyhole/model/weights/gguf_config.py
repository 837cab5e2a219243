"""Compares what a GGUF file says of its model with the config.json beside it.

The module is built by the config, and the file only gives its tensors: with another number of heads, rope base or norm
epsilon they fit as well, and the model computes something else. So whatever both of them say must agree. A config
with fewer layers than the file is let through; the tensors that it leaves out are named elsewhere (unused.py).
"""

from pathlib import Path
from typing import Any, TypeGuard

from keyhole.disk.weight_files import gguf_settings
from keyhole.errors import UserError

NAMES = {
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
"""Key of a GGUF, after its architecture -> key of config.json."""

NEAR = 1e-3  # relative; GGUF has float32


def check_gguf_config(config: Any, directory: Path) -> None:
    """UserError if the GGUF files of a directory, if it has some, contradict the config."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    for file, settings in gguf_settings(directory).items():
        for theirs, ours in NAMES.items():
            given, mine = settings.get(theirs), getattr(text, ours, None)
            if ours == "rope_theta" and isinstance(rope, dict):
                mine = rope.get(ours, mine)
            if not _is_number(given) or not _is_number(mine) or _agree(given, mine, theirs):
                continue
            raise UserError(
                f"model: {directory / file} says {theirs} = {given:.7g}, but config.json beside it says {ours} = "
                f"{mine:.7g}: it is the config of another model; put that of the original model there"
            )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _agree(given: float, mine: float, key: str) -> bool:
    if key == "block_count":
        return mine <= given
    return given == mine if isinstance(given, int) else abs(given - mine) <= NEAR * abs(mine)
