"""CONFIG and settings on the command line, and the shipped recipes (keyhole/configs/*.yaml).

    my.yaml learning_rate=1e-5                            a file, and settings that replace its entries
    learning_rate=1e-5 my.yaml                            the same
    model=DIR method=lomo train_data=a.jsonl ...          no file: the settings are the whole config

An argument is a setting if the part before the first = is the name of a setting, or could be a misspelt one. It is a
file if a file of that name exists, if the part before = is not a word (runs/lr=1/my.yaml), or if it ends in .yaml. So
the message for a misspelt setting suggests the nearest setting, and that for a misspelt file the nearest file.

A recipe's first comment line is its title. If CONFIG is not a file but the name of a recipe, that recipe is used, so
`keyhole train demo-zo` works from anywhere; the caller prints this. Anything else is refused with the nearest name.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from keyhole.config.faults import nearest
from keyhole.config.fields import sections, settings
from keyhole.config.loader import parse_config
from keyhole.config.schema import TrainConfig
from keyhole.errors import UserError

DIRECTORY = Path(__file__).parents[1] / "configs"
NO_FILE = "settings (no config file was named)"
FILE_ENDINGS = (".yaml", ".yml")


def recipes() -> dict[str, Path]:
    """Name -> file, sorted."""
    return {path.stem: path for path in sorted(DIRECTORY.glob("*.yaml"))}


def listing(files: dict[str, Path]) -> str:
    """Names and titles, the first comment line of each."""
    width = max(map(len, files))
    titles = {name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in files.items()}
    return "\n".join(f"{name:<{width}}  {title.lstrip('# ').strip()}" for name, title in titles.items())


def copy_recipe(name: str, dest: str | None) -> Path:
    """Writes a recipe to a file or into a directory; refuses to overwrite anything."""
    shipped, stem = recipes(), name.removesuffix(".yaml")
    if stem not in shipped:
        raise UserError(f"`{name}` is not a shipped recipe{nearest(stem, shipped)}; see keyhole config ls")
    recipe = shipped[stem]
    target = Path(dest or recipe.name)
    target = target / recipe.name if target.is_dir() else target
    try:
        with target.open("xb") as file:
            file.write(recipe.read_bytes())
    except FileExistsError:
        raise UserError(f"{target} exists; give another name: keyhole config cp {recipe.stem} NEW") from None
    except OSError as error:
        raise UserError(f"{target}: cannot write: {error.strerror}") from None
    return target


def find_config(config: str) -> tuple[Path, bool]:
    """(file, whether it is a shipped recipe) for the CONFIG argument."""
    path = Path(config)
    if os.path.isdir(path):
        inside = path / "run" / "config.yaml"
        hint = f"; the config of that run is {inside}" if inside.is_file() else "; a config is a YAML file"
        if not inside.is_file() and (path / "config.json").is_file():
            hint = f"; to name a model, write model={config}"
        raise UserError(f"{config} is a directory{hint}")
    if os.path.exists(path):
        return path, False
    name = path.name.removesuffix(".yaml")
    if name in recipes() and str(path.parent) in (".", "configs"):
        return recipes()[name], True
    hint = nearest(config, map(str, path.parent.glob("*.y*ml"))) or nearest(name, recipes())
    raise UserError(f"{config}: no such config file{hint}; shipped recipes: keyhole config ls")


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
    return (None, list(words)) if place is None else (words[place], [*words[:place], *words[place + 1 :]])


def config_of_settings(
    words: Sequence[str], stand_ins: dict[str, object] | None = None
) -> tuple[TrainConfig, list[str]]:
    """The config from settings alone, and warnings. stand_ins: values for settings that the command does not use."""
    return parse_config(json.dumps(stand_ins or {}), words, source=NO_FILE, where="")
