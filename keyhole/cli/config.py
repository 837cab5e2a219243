"""What there is: settings, recipes, and this machine.

keyhole config ls | cp NAME [DEST] | show [CONFIG] [key=value ...]
keyhole env [--json]
"""

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


def machine_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What machine/probe.py has found, as (name, text)."""

    def gib(count: int | None) -> str:
        return "none" if count is None else f"{count / GIB:.1f} GiB"

    memory, cuda, link = found["host_memory"], found["cuda"], found["link_gb_s"]
    kernels = {"triton": f", {found['triton']}"}
    lines = [(name, (own or "not installed") + kernels.get(name, "")) for name, own in found["versions"].items()]
    free, limit = gib(memory["available_bytes"]), gib(memory["cgroup_limit_bytes"])
    lines += [
        ("os", found["os"]),
        ("cpu", f"{found['cpu']['name']}, {found['cpu']['cores']} cores usable"),
        ("host memory", f"{gib(memory['total_bytes'])}, {free} available, control-group limit: {limit}"),
        ("cuda", f"torch built for {cuda['built_for'] or 'CPU only'}, driver {cuda['driver'] or 'none'}"),
    ]
    for gpu in found["gpus"]:
        sizes = f"{gib(gpu['total_bytes'])}, {gib(gpu['free_bytes'])} free"
        lines.append(("gpu", f"{gpu['name']}, {sizes}, capability {gpu['capability']}"))
    if isinstance(link, dict):
        alone = f"{link['host_to_device']} GB/s up, {link['device_to_host']} GB/s down"
        link = f"{alone}, {link['both_ways']} GB/s each way at once (pinned)"
    return lines + ([("link", link)] if found["gpus"] else [("gpu", "none: everything runs on the CPU")])
