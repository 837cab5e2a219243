"""Checks of a model's config.json and generation_config.json before Transformers uses them.

Transformers builds what config.json says: ten million layers take hours, a width of 10^9 takes terabytes, and an
attention implementation whose name has a slash is code that it downloads from a hub. So numbers that no model has and
such names are refused. (That the others fit the weight files is checked once the module is built.)

A config may also ask Transformers to add losses to the cross-entropy of the tokens, which are not computed here:

    loss = cross-entropy + router_aux_loss_coef * balance of the routers       where output_router_logits is true
    loss = cross-entropy + z_loss_coefficient * mean(logsumexp(logits)^2)

A run without them would train another loss, so training is refused until the config turns them off.

The same weights under another config are another model. So a run, and its journal, is resumed and replayed over a
config.json that says what it said: its keys are kept beside the hash of the weights, but for those of NO_NUMBER.

generation_config.json has end-of-turn tokens and sampling settings, which are often in this file only. A million beams
are a million copies of the cache, and a word in place of a number raises a traceback at the first answer. So types and
sizes are checked when the file is read.
"""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keyhole.disk.json_text import Json, read_json
from keyhole.errors import UserError
from keyhole.model.structure.source import find_directory

REGRESSION, MULTI_LABEL = "regression", "multi_label_classification"

LAYERS, MOST_LAYERS = ("layers", "n_layer", "num_blocks", "n_block"), 4096
SIZES, MOST_SIZE = (
    ("_size", "_dim", "_heads", "_experts", "_per_tok", "n_embd", "n_head", "n_inner", "d_model", "d_kv", "d_ff"),
    2**22,
)
POSITIONS, MOST_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 2**28
WORDS = ("model_type", "dtype", "torch_dtype")


# They change no number: who wrote the file, and from where; the class (of another kind of head other tensors are
# expected); a cache that no pass of training has. (dtype counts, under either of its names: it is that of dtype=null.)
NO_NUMBER = {"transformers_version", "_name_or_path", "_commit_hash", "architectures", "use_cache"}


def setting(config: object, key: str, default: object = None) -> Any:
    """A setting of a config that not every family has."""
    return getattr(config, key, default)


def problem_of(config: Any) -> str:
    """Hugging Face's problem_type: from the config, or derived from the number of labels."""
    return config.problem_type or (REGRESSION if config.num_labels == 1 else "single_label_classification")


def check_config_file(path: Path) -> None:
    """UserError if a config.json asks for sizes that no model has, or for code from elsewhere."""
    config = read_json(path, "model")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"model: {path}: architectures is {names!r:.60}; a list of names is expected")
    for key, value in _entries(config):
        if key in WORDS and not isinstance(value, str | None):
            raise UserError(f"model: {path}: {key} is {value!r:.60}; a word is expected")
        check_implementation(key, value, path)
        counts_layers, is_size = any(word in key for word in LAYERS), key.endswith(SIZES)
        if isinstance(value, int | float) and (counts_layers or is_size or key in POSITIONS):
            if not 0 <= value <= (MOST_LAYERS if counts_layers else MOST_SIZE if is_size else MOST_POSITIONS):
                is_short = isinstance(value, float) or value.bit_length() < 1000
                shown = f"{value:g}" if is_short else "beyond all numbers"
                raise UserError(
                    f"model: {path}: {key} is {shown}, {'less' if value < 0 else 'more'} than any model has"
                )


def identity(config: Json, prefix: str = "") -> Json:
    """What a model computes, by the keys of its config, those of configs in it dotted."""
    found: Json = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found |= identity(value, f"{prefix}{key}.")
        elif key not in NO_NUMBER:
            found[prefix + ("dtype" if key == "torch_dtype" else key)] = value
    return found


def base_config(model: str | Path) -> Json:
    """The identity of a model's files; {} if only those of its weights (GGUF) describe it, which are hashed."""
    path = find_directory(model) / "config.json"
    return identity(read_json(path, "model")) if path.exists() else {}


def config_fault(then: Json | None, now: Json) -> str | None:
    """The first key that differs from an identity that was written down (None: none was), then and now."""
    then = now if then is None else then
    differ = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
    told = [f"{key} was {then.get(key)!r:.200} then, and is {now.get(key)!r:.200} now" for key in differ]
    return f"has another config.json: {told[0]}" if told else None


def check_implementation(key: str, value: object, where: object) -> None:
    """Refuses kernels that Transformers would download from a hub and run."""
    if "implementation" in key and "/" in str(value):
        raise UserError(
            f"model: {where}: {key} is {value!r}: Transformers would fetch that code from a hub and run it; remove the "
            "key, or name an implementation that is installed (sdpa, eager)"
        )


def _entries(config: dict[str, object], depth: int = 0) -> Iterator[tuple[str, object]]:
    """(key, value) of the config and of the configs inside it."""
    for key, value in config.items():
        if isinstance(value, dict) and depth < 4:
            yield from _entries(value, depth + 1)
        yield key, value


OF_ROUTERS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
ALWAYS = ("z_loss_coefficient",)


def check_loss(config: object) -> None:
    """UserError if the config asks for a loss beside the cross-entropy of the tokens."""
    configs = list(_configs(config))
    with_routers = any(setting(one, "output_router_logits") for one in configs)
    for key in (*ALWAYS, *(OF_ROUTERS if with_routers else ())):
        coefficient = next((value for one in configs if (value := setting(one, key))), 0)
        if coefficient:
            off = f'"{key}": 0.0' + (' or "output_router_logits": false' if key in OF_ROUTERS else "")
            raise UserError(
                f"model: {key} is {coefficient:g} in its config"
                + (" and output_router_logits is true" if key in OF_ROUTERS else "")
                + ": Transformers would add that loss to the one of the tokens, keyhole would not. Write "
                f"{off} into config.json to train without it"
            )


def _configs(config: object) -> Iterator[object]:
    """The config, and those inside it."""
    yield config
    for name in setting(config, "sub_configs") or ():
        if (inside := setting(config, name)) is not None and not isinstance(inside, dict):
            yield from _configs(inside)


MOST = 2**31 - 1
COUNTS = dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1, 256)) | dict.fromkeys(
    ("max_new_tokens", "max_length", "min_length", "min_new_tokens", "top_k", "no_repeat_ngram_size"), (0, MOST)
)
NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty", "epsilon_cutoff")
TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")
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


def _expected(key: str, value: object) -> str:
    """The kind of value that is expected; "" if the value is valid."""
    if key in COUNTS:
        low, high = COUNTS[key]
        return "" if _is_count(value, low, high) else f"a whole number from {low} to {high}"
    if key in NUMBERS:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return "" if number else "a number"
    if key in TOKENS:
        ids = value if isinstance(value, list) else [value]
        return "" if ids and all(_is_count(i, -1, MOST) for i in ids) else "a token id, or a list of them,"
    return ""


def _is_count(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
