"""Checks of a model's config.json before Transformers uses it.

Transformers builds what the file says: ten million layers take hours, a width of 10^9 takes terabytes, and an attention
implementation whose name has a slash is code that it downloads from a hub. So suspiciously large numbers are compared
with the shapes in the weight files, whose headers take milliseconds to read, and such names are refused.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keyhole.disk.json_text import read_json
from keyhole.disk.weight_files import has_weights, stored_tensors
from keyhole.errors import UserError

LAYERS, MOST_LAYERS = ("layers", "n_layer", "num_blocks", "n_block"), 512
SIZES, MOST_SIZE = (
    ("_size", "_dim", "_heads", "_experts", "n_embd", "n_head", "n_inner", "d_model", "d_kv", "d_ff"),
    2**20,
)
POSITIONS, MOST_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 2**28
NEVER = 2**24  # sizes above this are refused if there are no weights to compare with
WORDS = ("model_type", "dtype", "torch_dtype")


def check_config_file(path: Path) -> None:
    """UserError if a config.json contradicts its weight files, or asks for code from elsewhere."""
    config = read_json(path, "model")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"model: {path}: architectures is {names!r:.60}; a list of names is expected")
    for key, value in _entries(config):
        if key in WORDS and not isinstance(value, str | None):
            raise UserError(f"model: {path}: {key} is {value!r:.60}; a word is expected")
        check_implementation(key, value, path)
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(key, value, path)


def check_implementation(key: str, value: Any, where: object) -> None:
    """Refuses kernels that Transformers would download from a hub and run."""
    if "implementation" in key and "/" in str(value):
        raise UserError(
            f"model: {where}: {key} is {value!r}: Transformers would fetch that code from a hub and run it; remove the "
            "key, or name an implementation that is installed (sdpa, eager)"
        )


def _entries(config: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(key, value) of the config and of the configs inside it."""
    for key, value in config.items():
        if isinstance(value, dict) and depth < 4:
            yield from _entries(value, depth + 1)
        yield key, value


def _check_number(key: str, value: float, path: Path) -> None:
    counts_layers = any(word in key for word in LAYERS)
    if counts_layers and value > MOST_LAYERS:
        _compare(key, value, path, MOST_LAYERS * 8, "tensors", lambda shapes: len(shapes))
    elif key.endswith(SIZES) and value > MOST_SIZE:
        longest = lambda shapes: max((side for shape in shapes for side in shape), default=0)  # noqa: E731
        _compare(key, value, path, NEVER, "rows or columns in their largest tensor", longest)
    elif key in POSITIONS and value > MOST_POSITIONS:
        raise UserError(f"model: {path}: {key} is {_number(value)}, more than any model has")


def _number(value: float) -> str:
    """`1e+09`, also for an integer with more digits than a float can hold."""
    return f"{value:g}" if isinstance(value, float) or value.bit_length() < 1000 else "beyond all numbers"


def _compare(key: str, value: float, path: Path, most: int, unit: str, count: Any) -> None:
    """Compares a number that is larger than usual with the weights."""
    if not has_weights(path.parent):
        if value > most:
            raise UserError(f"model: {path}: {key} is {_number(value)}, more than any model has")
        return
    found = count([stored.shape for stored in stored_tensors(path.parent).values()])
    if value > found:
        raise UserError(
            f"model: {path}: {key} is {_number(value)}, but the weight files beside it have {found:,} {unit}; is it "
            "the config of another model?"
        )
