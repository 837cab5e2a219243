"""Splits command-line arguments into CONFIG and settings: `my.yaml learning_rate=1e-5`, or only settings.

    my.yaml learning_rate=1e-5                            a file, and settings that replace its entries
    learning_rate=1e-5 my.yaml                            the same
    model=DIR method=lomo train_data=a.jsonl ...          no file: the settings are the whole config

An argument is a setting if the part before the first = is the name of a setting, or could be a misspelt one. It is a
file if a file of that name exists, if the part before = is not a word (runs/lr=1/my.yaml), or if it ends in .yaml. So
the message for a misspelt setting suggests the nearest setting, and that for a misspelt file the nearest file.
"""

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from keyhole.config.fields import sections, settings
from keyhole.config.loader import parse_config
from keyhole.config.schema import TrainConfig

NO_FILE = "settings (no config file was named)"
FILE_ENDINGS = (".yaml", ".yml")


def is_override(word: str) -> bool:
    """Whether the argument is `key=value` with an existing key."""
    key, equals, _ = word.partition("=")
    return bool(equals) and (key in settings() or key in sections())


def is_setting(word: str) -> bool:
    """Whether the argument is meant as `key=value`, not as the name of a file."""
    key, equals, _ = word.partition("=")
    if not equals or os.path.isfile(word):
        return False
    return is_override(word) or (bool(re.fullmatch(r"[A-Za-z_][\w.-]*", key)) and not word.endswith(FILE_ENDINGS))


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """(CONFIG, or None if only settings were given; the other arguments)."""
    place = next((i for i, word in enumerate(words) if not is_setting(word)), None)
    if place is None:
        return None, list(words)
    return words[place], [*words[:place], *words[place + 1 :]]


def config_of_settings(words: Sequence[str], stand_ins: dict[str, Any] | None = None) -> tuple[TrainConfig, list[str]]:
    """The config from settings alone, and warnings. stand_ins: values for settings that the command does not use."""
    return parse_config(json.dumps(stand_ins or {}), words, source=NO_FILE, where="")
