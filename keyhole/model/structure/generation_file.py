"""generation_config.json: end-of-turn tokens and sampling settings, which are often in this file only.

Transformers uses the file unchecked: a million beams are a million copies of the cache, and a word in place of a number
raises a traceback at the first answer. So types and sizes are checked when the file is read.
"""

import copy
import math
from pathlib import Path
from typing import Any

from keyhole.disk.json_text import read_json
from keyhole.errors import UserError

FEW = ("num_beams", "num_beam_groups", "num_return_sequences")
COUNTS = ("max_new_tokens", "max_length", "min_length", "min_new_tokens", "top_k", "no_repeat_ngram_size")
NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty", "epsilon_cutoff")
TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")
MOST_BEAMS, MOST = 256, 2**31 - 1
ONLY_SAMPLING = ("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
ONLY_BEAMS = ("early_stopping", "length_penalty")


def read_generation_config(directory: Path) -> Any:
    """The settings in a model's directory; a UserError names what is wrong with them."""
    from transformers import GenerationConfig

    path = directory / "generation_config.json"
    for key, value in read_json(path, "model").items():
        if value is not None and (expected := _expected(key, value)):
            raise UserError(f"model: {path}: {key} is {value!r:.60}; {expected} is expected")
    try:
        found = GenerationConfig.from_pretrained(directory)
        copied = copy.deepcopy(found)
        make_writable(copied)
        copied.validate(strict=True)  # every save does this
    except Exception as error:  # settings that contradict each other, keys of another version
        raise UserError(f"model: {path} cannot be read: {error}") from error
    return found


def make_writable(generation: Any) -> None:
    """Unsets settings that have no effect, such as a temperature beside do_sample=False: some models are published with
    them, and Transformers refuses to save them. The model generates as before. None: a classifier has no settings."""
    if generation is None:
        return
    unused: tuple[str, ...] = () if generation.do_sample else ONLY_SAMPLING
    unused += () if (generation.num_beams or 1) > 1 else ONLY_BEAMS
    try:
        generation.validate(strict=True)
    except ValueError:
        for name in unused:
            setattr(generation, name, None)


def _expected(key: str, value: Any) -> str:
    """The kind of value that is expected; "" if the value is valid."""
    if key in FEW:
        return "" if _is_count(value, 1, MOST_BEAMS) else f"a whole number from 1 to {MOST_BEAMS}"
    if key in COUNTS:
        return "" if _is_count(value, 0, MOST) else f"a whole number from 0 to {MOST}"
    if key in NUMBERS:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return "" if number else "a number"
    if key in TOKENS:
        ids = value if isinstance(value, list) else [value]
        return "" if ids and all(_is_count(i, -1, MOST) for i in ids) else "a token id, or a list of them,"
    return ""


def _is_count(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
