"""keyhole env [--json]"""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from keyhole.machine.collector import no_collector
from keyhole.machine.sizes import GIB


def env(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Print versions, GPU, memory and link speed: paste it into issues."""
    from keyhole.disk.json_text import json_text
    from keyhole.machine.probe import environment

    with no_collector():  # torch is imported
        found = environment(measure_link=True)
    typer.echo(json_text(found, indent=2) if as_json else "\n".join(_lines(found)))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    for name, version in found["versions"].items():
        state = found["triton"] if name == "triton" else None if version else "not installed"
        yield f"{name:<13} {', '.join(filter(None, (version, state)))}"
    memory, cuda, link = found["host_memory"], found["cuda"], found["link_gb_s"]
    limit = memory["cgroup_limit_bytes"]
    group = "no control-group limit" if limit is None else f"control-group limit {limit / GIB:.1f} GiB"
    yield f"{'os':<13} {found['os']}"
    yield f"{'cpu':<13} {found['cpu']['name']}, {found['cpu']['cores']} cores usable"
    yield (
        f"{'host memory':<13} {memory['total_bytes'] / GIB:.1f} GiB, "
        f"{memory['available_bytes'] / GIB:.1f} GiB available, {group}"
    )
    yield f"{'cuda':<13} torch built for {cuda['built_for'] or 'CPU only'}, driver {cuda['driver'] or 'none'}"
    for gpu in found["gpus"]:
        memory = f"{gpu['total_bytes'] / GIB:.1f} GiB, {gpu['free_bytes'] / GIB:.1f} GiB free"
        yield f"{'gpu':<13} {gpu['name']}, {memory}, capability {gpu['capability']}"
    if not found["gpus"]:
        yield f"{'gpu':<13} none: everything runs on the CPU"
    if isinstance(link, str):
        yield f"{'link':<13} {link}"
    elif link is not None:
        yield (
            f"{'link':<13} {link['host_to_device']} GB/s up, {link['device_to_host']} GB/s down, "
            f"{link['both_ways']} GB/s each way at once (pinned)"
        )
