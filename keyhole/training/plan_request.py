"""The arguments of `keyhole plan`, checked before torch is imported and before a machine is measured.

MODEL is a directory (config.json is enough), a hub id, or demo. CONFIG is a YAML file or a recipe, which gives batches,
length, dtype, steps, and the settings of every method; settings alone (model=DIR method=lomo) work too. Options replace
numbers of the machine or of the config:

    --gpu, --ram SIZE    bytes that may be used           --link RATE     bytes/s, each way
    --tokens BxT         samples x tokens of a batch      --machine NAME  one of plan/seconds.py, or here
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from keyhole import assets
from keyhole.config import TrainConfig
from keyhole.config.loader import load_config, parse_config
from keyhole.config.recipes import config_of_settings, find_config, recipes, split_words
from keyhole.errors import UserError
from keyhole.machine.rates import Rates
from keyhole.machine.sizes import Bytes
from keyhole.methods import METHODS
from keyhole.model.structure.source import check_directory
from keyhole.plan.seconds import profile

DEFAULT = {"batch_size": 4, "max_length": 1024, "max_steps": 1000}


@dataclass(frozen=True)
class PlanRequest:
    """The parsed arguments; --tokens is in the config. machine: None if it is to be detected; names_method: the method
    is asked for (else a config is made for the model)."""

    config: TrainConfig
    names_method: bool
    steps: int | None
    gpu_bytes: int | None
    ram_bytes: int | None
    link: float | None
    machine: Rates | str | None
    measure: bool


def check_plan(
    model: str,
    overrides: Sequence[str] = (),
    *,
    gpu: str | None = None,
    ram: str | None = None,
    link: str | None = None,
    tokens: str | None = None,
    steps: int | None = None,
    machine: str | None = None,
    measure: bool = False,
) -> PlanRequest:
    """Parses options and config and checks that the model exists; UserError names the first mistake."""
    rates = machine if machine is None or machine.lower() == "here" else profile(machine)
    ram_bytes, gpu_bytes = _bytes("--ram", ram), _bytes("--gpu", gpu)
    try:
        rate = None if link is None else float(Bytes.parse(link.strip().removesuffix("/s")))
    except ValueError as error:
        raise UserError(f"--link: {link!r} is no rate, such as 25GB/s") from error
    shape = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,7})", (tokens or "1x1").strip().lower())
    if shape is None:
        raise UserError(f"--tokens: found {tokens!r}, expected samples x tokens, such as 4x1024")
    named, words = split_words([model, *overrides])
    config, is_config = _config(named, words)
    if tokens:
        config = replace(config, batch_size=int(shape[1]), max_length=int(shape[2]))
    if gpu_bytes is None and config.gpu_memory is not None:
        gpu_bytes = int(config.gpu_memory)
    check_directory(config.model)
    asks = is_config or any(word.startswith("method=") for word in words)
    return PlanRequest(config, asks, steps, gpu_bytes, ram_bytes, rate, rates, measure)


def _config(named: str | None, words: list[str]) -> tuple[TrainConfig, bool]:
    """The config, and whether it was given (otherwise it is made for the model)."""
    method = next(row.name for row in METHODS.values() if row.sweep == "reverse")
    made = {"method": method, "output_dir": "not-written", "train_data": "not-read", **DEFAULT}
    if any(word.startswith("task=") for word in words):
        del made["train_data"]
    if named is None:
        return config_of_settings(words, made)[0], False
    is_file = os.path.isfile(named)
    if (is_file and not named.endswith(".json")) or named.removesuffix(".yaml") in recipes():
        return load_config(find_config(named)[0], words)[0], True
    if is_file:  # a config.json itself
        named = os.path.dirname(os.path.abspath(named))
    model = assets.locate(os.path.expanduser(named), assets.MODEL)
    return parse_config(json.dumps(made | {"model": model}), words, source="plan", where="")[0], False


def _bytes(option: str, text: str | None) -> int | None:
    try:
        return None if text is None else int(Bytes.parse(text))
    except ValueError as error:
        raise UserError(f"{option}: {text!r} is not {error}") from error
