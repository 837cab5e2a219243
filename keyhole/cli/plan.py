"""keyhole plan MODEL|CONFIG [key=value ...] [--gpu SIZE] [--ram SIZE] [--link RATE] [--tokens BxT] [--machine NAME]"""

import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.cli.arguments import note
from keyhole.machine.collector import imports
from keyhole.machine.sizes import GIB

QUIET_S = 5.0


def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL|CONFIG", help="Model directory (config.json is enough), hub id, or a config."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, as of `keyhole train`.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="SIZE", help="GPU memory that may be used, such as 8GiB.")] = None,
    ram: Annotated[str | None, typer.Option(metavar="SIZE", help="Host memory that may be used.")] = None,
    link: Annotated[str | None, typer.Option(metavar="RATE", help="Rate of the link each way, such as 25GB/s.")] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="BxT", help="Samples x tokens per step, such as 4x1024.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the run, for its hours.", min=1)] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="laptop, 3060, 4080, 4090, a10, a100, h100, h200: estimates; or here."),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The rows as JSON.")] = False,
    page: Annotated[str | None, typer.Option(metavar="FILE", help="Write a page with the trade-off drawn.")] = None,
) -> None:
    """Plan a run: memory, pace and hours of every method and placement, and which to take.

    Example: keyhole plan meta-llama/Llama-3.1-8B --gpu 24GiB --ram 64GiB --tokens 4x1024
    """
    from keyhole.training.plan_request import check_plan

    options = {"gpu": gpu, "ram": ram, "link": link, "tokens": tokens, "machine": machine, "page": page}
    request = check_plan(model, overrides or [], steps=steps, measure=measure, **options)
    with imports():
        from keyhole.disk.json_text import json_text
        from keyhole.plan.recommend import recommended
        from keyhole.plan.table import rows
        from keyhole.training.planning import ask

    late = threading.Timer(QUIET_S, note, ["still planning: a model of a thousand layers takes about a minute"])
    late.daemon = True
    late.start()
    try:
        found = ask(request, note)
        table = rows(found.question)
        chosen = recommended(table)
        lines = [] if as_json else [*found.lines, *_table(table, chosen), *_end(found, table, chosen)]
    finally:
        late.cancel()
    if as_json:
        lines = [json_text([row.to_dict() | {"recommended": row is chosen} for row in table], indent=1)]
    for line in lines:
        typer.echo(line)
    if page is not None:  # last: a page that cannot be written does not take the table with it
        _write_page(Path(page), found, table, chosen)
        if not as_json:
            typer.echo(f"page: {page}")


def _write_page(path: Path, found: Any, table: list[Any], chosen: Any) -> None:
    from keyhole.disk.files import replacing
    from keyhole.errors import UserError
    from keyhole.plan.page import make_page

    text = make_page(found.title, table, chosen, found.question, found.lines)
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UserError(f"--page: {path} cannot be written: {error.strerror or error}") from error


NOTHING = "  nothing that is known here: more memory is needed"
HEAD = (
    "",
    "method",
    "placement",
    "wire",
    "GPU GiB",
    "host GiB",
    "disk GiB",
    "s/step",
    "tok/s",
    "hours",
    "bound by",
    "fits",
)


def _table(table: list[Any], chosen: Any) -> list[str]:
    cells = [HEAD]
    for row in table:
        cells.append(
            (
                "->" if row is chosen else "", row.method, row.placement, row.stored, f"{row.gpu_bytes / GIB:.2f}",
                f"{row.host_bytes / GIB:.1f}", f"{row.disk_bytes / GIB:.0f}", f"{row.step_seconds:.3g}",
                f"{row.tokens_per_second:,.0f}", f"{row.hours:.2g}", row.bound_by,
                "yes" if row.fits else f"lacks {row.missing}",
            )
        )  # fmt: skip
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    left = {0, 1, 2, 3, 10, 11}
    return [
        "  ".join(
            f"{text:<{w}}" if i in left else f"{text:>{w}}"
            for i, (text, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _end(found: Any, table: list[Any], chosen: Any) -> list[str]:
    from keyhole.plan.changes import cheapest_changes
    from keyhole.plan.recommend import reason, settings_of

    steps = f"hours: to learn what {found.question.steps:,.0f} steps of AdamW learn (docs/plan.md)"
    asked = [
        row
        for row in table
        if (row.method, row.placement) == (found.method, found.placement) and row.wire == found.wire
    ]
    lines = [steps]
    if chosen is not None:
        lines.append(f"take: {settings_of(chosen, found.question)}: {reason(chosen, table, found.question)}")
    if found.method is not None and asked and not asked[0].fits:
        lines.append(f"method={found.method} placement={found.placement} does not fit; what would, cheapest first:")
        changes = cheapest_changes(found.question, found.method, str(found.placement), found.wire)
        lines += [f"  {change}" for change in changes] or [NOTHING]
    elif chosen is None:
        lines += _least(table, found)
    return lines


def _least(table: list[Any], found: Any) -> list[str]:
    """If nothing fits and the config asks for no particular row: the row that needs the least, and what would be
    enough."""
    from keyhole.plan.changes import cheapest_changes
    from keyhole.plan.recommend import settings_of

    least = min(table, key=lambda row: (row.gpu_bytes, row.host_bytes))
    lines = [
        f"nothing fits; the least GPU memory is that of {settings_of(least, found.question)}: "
        f"{least.gpu_bytes / GIB:.2f} GiB, with {least.host_bytes / GIB:.1f} GiB of host memory. "
        "Changes of it that would fit, cheapest first:"
    ]
    changes = cheapest_changes(found.question, least.method, least.placement, least.wire)
    return lines + ([f"  {change}" for change in changes] or [NOTHING])
