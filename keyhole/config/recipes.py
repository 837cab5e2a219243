"""The shipped recipes (keyhole/configs/*.yaml), and how a CONFIG on the command line is found.

A recipe's first comment line is its title. If CONFIG is not a file but the name of a recipe, that recipe is used, so
`keyhole train demo-zo` works from anywhere; the caller prints this. Anything else is refused with the nearest name.
"""

import os
from pathlib import Path

from keyhole.config.faults import nearest
from keyhole.errors import UserError

DIRECTORY = Path(__file__).parents[1] / "configs"


def recipes() -> dict[str, Path]:
    """Name -> file, sorted."""
    return {path.stem: path for path in sorted(DIRECTORY.glob("*.yaml"))}


def listing(files: dict[str, Path]) -> str:
    """Names and titles, the first comment line of each."""
    width = max(map(len, files))
    titles = {name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in files.items()}
    return "\n".join(f"{name:<{width}}  {title.lstrip('# ').strip()}" for name, title in titles.items())


def find_recipe(name: str) -> Path:
    """The file of a shipped recipe, with or without .yaml."""
    shipped = recipes()
    stem = name.removesuffix(".yaml")
    if stem not in shipped:
        raise UserError(f"`{name}` is not a shipped recipe{nearest(stem, shipped)}; see keyhole config ls")
    return shipped[stem]


def copy_recipe(name: str, dest: str | None) -> Path:
    """Writes a recipe to a file or into a directory; refuses to overwrite anything."""
    recipe = find_recipe(name)
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
    beside = [str(p) for p in path.parent.glob("*.y*ml")] if os.path.isdir(path.parent) else []
    hint = nearest(config, beside) or nearest(name, recipes())
    raise UserError(f"{config}: no such config file{hint}; shipped recipes: keyhole config ls")
