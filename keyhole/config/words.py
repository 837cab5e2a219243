"""CONFIG and settings as they are typed: `my.yaml learning_rate=1e-5`, or settings alone.

    my.yaml learning_rate=1e-5                            a file, and what replaces its entries
    learning_rate=1e-5 my.yaml                            the same
    model=DIR method=lomo train_data=a.jsonl ...          no file: the settings are the whole config

A word is a setting where its part before the first = is the name of one, or could be a misspelt one; it is a file where
there is a file of that name, where the part before = is no word (runs/lr=1/my.yaml), or where it ends in .yaml. So a
misspelt setting is answered with the nearest setting, and a misspelt file with the nearest file.
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
    """Whether the word is `key=value` with a key that exists."""
    key, equals, _ = word.partition("=")
    return bool(equals) and (key in settings() or key in sections())


def is_setting(word: str) -> bool:
    """Whether the word is meant as `key=value`, rather than as the name of a file."""
    key, equals, _ = word.partition("=")
    if not equals or os.path.isfile(word):
        return False
    return is_override(word) or (bool(re.fullmatch(r"[A-Za-z_][\w.-]*", key)) and not word.endswith(FILE_ENDINGS))


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """(CONFIG, or None where only settings were typed; the other words)."""
    place = next((i for i, word in enumerate(words) if not is_setting(word)), None)
    if place is None:
        return None, list(words)
    return words[place], [*words[:place], *words[place + 1 :]]


def config_of_settings(words: Sequence[str], stand_ins: dict[str, Any] | None = None) -> tuple[TrainConfig, list[str]]:
    """The config that settings alone make, and warnings. stand_ins: values of what the command does not look at."""
    return parse_config(json.dumps(stand_ins or {}), words, source=NO_FILE, where="")
