"""keyhole config ls | cp NAME [DEST] | show [CONFIG] [key=value ...]"""

from typing import Annotated

import typer

from keyhole.cli.arguments import Overrides, SettingsCommand, load_settings
from keyhole.config import docs
from keyhole.config.recipes import copy_recipe, recipes, title

app = typer.Typer(
    help="List, copy and show recipes, and what every setting means.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def ls() -> None:
    """List the shipped recipes."""
    width = max(map(len, recipes()))
    for name, path in recipes().items():
        typer.echo(f"{name:<{width}}  {title(path)}")


@app.command()
def cp(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe of `keyhole config ls`.")],
    dest: Annotated[str | None, typer.Argument(metavar="DEST", help="File or directory to write.")] = None,
) -> None:
    """Copy a recipe here, to edit it. An existing file is never written over."""
    target = copy_recipe(name, dest)
    typer.echo(f"wrote {target}; run it with: keyhole train {target}")


@app.command(cls=SettingsCommand)
def show(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="Config or recipe; without it, all settings.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Explain every setting, or a config as it would run.

    Without CONFIG: all settings with type, default and meaning. With it: the resolved values.
    """
    typer.echo(docs.explain() if config is None else docs.annotated(load_settings(config, overrides)))
