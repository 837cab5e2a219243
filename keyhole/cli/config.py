"""What there is: settings, recipes, and this machine.

keyhole config ls | cp NAME [DEST] | show [CONFIG] [key=value ...]
keyhole env [--json]
"""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from keyhole.cli.arguments import Overrides, SettingsCommand, load_settings
from keyhole.config import docs
from keyhole.config.recipes import copy_recipe, listing, recipes
from keyhole.machine.collector import no_collector
from keyhole.machine.sizes import GIB

app = typer.Typer(
    help="List, copy and show recipes, and what every setting means.",
    no_args_is_help=True,
    rich_markup_mode=None,
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
    lines = (f"{name:<13} {text}" for name, text in machine_lines(found))
    typer.echo(json_text(found, indent=2) if as_json else "\n".join(lines))


def machine_lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What machine/probe.py has found, as (name, text)."""
    for name, version in found["versions"].items():
        state = found["triton"] if name == "triton" else None if version else "not installed"
        yield name, ", ".join(filter(None, (version, state)))
    memory, cuda, link = found["host_memory"], found["cuda"], found["link_gb_s"]
    limit = memory["cgroup_limit_bytes"]
    group = "no control-group limit" if limit is None else f"control-group limit {limit / GIB:.1f} GiB"
    total, available = memory["total_bytes"] / GIB, memory["available_bytes"] / GIB
    yield "os", found["os"]
    yield "cpu", f"{found['cpu']['name']}, {found['cpu']['cores']} cores usable"
    yield "host memory", f"{total:.1f} GiB, {available:.1f} GiB available, {group}"
    yield "cuda", f"torch built for {cuda['built_for'] or 'CPU only'}, driver {cuda['driver'] or 'none'}"
    for gpu in found["gpus"]:
        sizes = f"{gpu['total_bytes'] / GIB:.1f} GiB, {gpu['free_bytes'] / GIB:.1f} GiB free"
        yield "gpu", f"{gpu['name']}, {sizes}, capability {gpu['capability']}"
    if not found["gpus"]:
        yield "gpu", "none: everything runs on the CPU"
    if isinstance(link, str):
        yield "link", link
    elif link is not None:
        alone = f"{link['host_to_device']} GB/s up, {link['device_to_host']} GB/s down"
        yield "link", f"{alone}, {link['both_ways']} GB/s each way at once (pinned)"
