"""What makes tables and pages of runs, and publishes them; and what there is: settings, recipes, and this machine.

keyhole compare [FILE] [key=value ...] [--dry-run] [--retry] [--allow-code-execution]
keyhole report DIR... [--output FILE]
keyhole push DIR ID [--private] [--dry-run]
keyhole demo [--output-dir DIR]
keyhole config ls | cp NAME [DEST] | show [CONFIG] [key=value ...]
keyhole env [--json]
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.arguments import AllowCode, Overrides, SettingsCommand, load_settings, note
from keyhole.config import docs
from keyhole.config.recipes import copy_recipe, listing, recipes
from keyhole.config.types import dump
from keyhole.errors import UserError
from keyhole.machine.collector import imports, no_collector


def compare(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="YAML file, or a shipped comparison; without it, their list.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="model=DIR, task_data=DIR, output_dir=DIR, tasks=, methods=, seeds=, "
            "and any setting of `keyhole train`, for all runs.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs, and stop.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed before.")] = False,
    allow_code_execution: AllowCode = False,
) -> None:
    """Compare methods as a table and a page.

    Runs every model x task x method x setting x seed of the file.

    Example: keyhole compare smollm2-sst2 model=DIR task_data=DIR output_dir=out
    """
    from keyhole.compare.file import comparisons, find_comparison, read_comparison

    if file is None:
        typer.echo(listing(comparisons()))
        return
    comparison = read_comparison(find_comparison(file), overrides or ())
    with imports():
        from keyhole.compare.execute import compare as run

    how = {"dry_run": dry_run, "retry": retry, "allow_code_execution": allow_code_execution}
    raise typer.Exit(run(comparison, say=typer.echo, **how))


def report(
    directories: Annotated[
        list[str], typer.Argument(metavar="DIR...", help="output_dir of runs, or directories that hold several.")
    ],
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The page.")] = "report.html",
) -> None:
    """Lay runs side by side: a table, and a page with their curves.

    The page has the settings that differ, too.

    A run's own page is run/report.html in its output_dir.

    Example: keyhole report out/lomo out/zo -o compared.html
    """
    from keyhole.disk.files import write_text
    from keyhole.disk.json_text import check_result_file
    from keyhole.machine.text import last_parts
    from keyhole.report.compared import make_page, table
    from keyhole.report.story import find_runs, read_view

    path = Path(output)
    check_result_file("--output", path)
    found = find_runs([Path(directory) for directory in directories])
    names = last_parts([directory.absolute().parent for directory in found])
    views = [read_view(directory, name) for directory, name in zip(found, names, strict=True)]
    for line in table(views):
        typer.echo(line)
    try:
        write_text(path, make_page(views, path.absolute().parent))
    except OSError as error:
        raise UserError(f"--output: {path} cannot be written: {error.strerror or error}") from error
    typer.echo(f"page: {path}")


def push(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The output_dir of a run, or a checkpoint in it.")],
    name: Annotated[str, typer.Argument(metavar="ID", help="Name on the hub: you/model, or model.")],
    private: Annotated[bool, typer.Option("--private", help="Only you may see it (of a new repository).")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card and the files; send nothing.")] = False,
) -> None:
    """Publish a trained model on the Hugging Face hub.

    With a card that says how it was made.

    Example: keyhole push out me/my-model --private
    """
    from keyhole.hub.push import check, check_id, files_of, text_of_card
    from keyhole.hub.push import push as run

    check_id(name, "ID")
    if dry_run:
        files, left = files_of(directory)
        check(directory)
        typer.echo(text_of_card(Path(directory), name))
        for line in (*(f"{path.stat().st_size:>14,} bytes  {file}" for file, path in files.items()), *left):
            note(line)
        return
    typer.echo(run(directory, name, private=True if private else None, say=note))


def demo(
    output_dir: Annotated[str, typer.Option(metavar="DIR", help="Where models and report go.")] = "demo-out",
) -> None:
    """Try every method on the embedded model: no GPU, no download.

    Takes about two minutes and ends with a table and an HTML report.
    """
    # torch's allocator on some processors then gives freed memory back: else no method but the first would need any
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "0")
    with imports():
        from keyhole.demo.run import run_demo

    run_demo(output_dir)


app = typer.Typer(
    help="List, copy and show recipes, and what every setting means.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def ls() -> None:
    """List the shipped recipes."""
    typer.echo(listing(recipes()))


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


def env(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Print versions, GPU, memory and link speed: paste it into issues."""
    from keyhole.disk.json_text import json_text
    from keyhole.machine.probe import environment

    with no_collector():  # torch is imported
        found = environment(measure_link=True)
    typer.echo(json_text(found, indent=2) if as_json else dump(found).rstrip())
