"""What takes a CONFIG and settings:

keyhole train CONFIG [key=value ...] [--resume [PATH]] [--dry-run] [--allow-code-execution]
keyhole data CONFIG [key=value ...] [-n 3]
keyhole plan MODEL|CONFIG [key=value ...] [--gpu SIZE] [--ram SIZE] [--link RATE] [--tokens BxT] [--machine NAME]
"""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from keyhole.cli.arguments import (
    AllowCode,
    ConfigArgument,
    Overrides,
    SettingsCommand,
    check_model,
    load_settings,
    note,
    with_resume_value,
)
from keyhole.machine.collector import imports
from keyhole.machine.sizes import GIB
from keyhole.machine.text import aligned
from keyhole.methods import METHODS
from keyhole.ranks.join import joined

if TYPE_CHECKING:
    from keyhole.plan.table import Question, Row
    from keyhole.training.plan_request import PlanRequest

LAST = "last"
STAND_INS = {"method": next(iter(METHODS)), "output_dir": "not-written", "max_steps": 1}  # samples need none of them


class TrainCommand(SettingsCommand):
    """`--resume` may be given without a value."""

    def rewrite(self, args: list[str]) -> list[str]:
        return with_resume_value(args, if_alone=LAST)


def train(
    config: ConfigArgument,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(metavar="[PATH]", help="Go on from a checkpoint: the last one in output_dir, or PATH.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check config, data and model, print what would run, and stop.")
    ] = False,
    allow_code_execution: AllowCode = False,
) -> None:
    """Fine-tune a model.

    Example: keyhole train my.yaml learning_rate=1e-6 zo.directions=4
    """
    with joined() as ranks:
        settings = load_settings(config, overrides)
        check_model(settings.model)
        from keyhole.training.start import Parts
        from keyhole.training.start import train as run

        parts = Parts(allow_code_execution=allow_code_execution, ranks=ranks, own_process=True)
        code = run(settings, resume=resume, dry_run=dry_run, parts=parts)
    raise typer.Exit(code)


def data(
    config: ConfigArgument,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option("-n", "--count", min=0, help="How many samples to show.")] = 3,
) -> None:
    """Show the first samples as the model will see them.

    Tokens, which of them are trained on, and what is cut. Only these samples are prepared.

    Example: keyhole data my.yaml -n 5 max_length=512
    """
    settings = load_settings(config, overrides, STAND_INS)
    check_model(settings.model)
    from keyhole.data.settings import data_settings
    from keyhole.data.sources import check_sources

    asked = data_settings(settings)
    check_sources(asked)
    with imports():
        import transformers.models.auto.tokenization_auto  # noqa: F401, every preview needs it

        from keyhole.data.run import preview_data

    typer.echo(preview_data(asked, count, color=sys.stdout.isatty()))


NOTHING = "  nothing that is known here: more memory is needed"


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
    steps: Annotated[int | None, typer.Option(help="Steps of the run, for its hours (1000).", min=1)] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="laptop, 3060, 4080, 4090, a10, a100, h100, h200: estimates; or here."),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The rows as JSON.")] = False,
) -> None:
    """Plan a run: memory and pace of every method, and which to take.

    Example: keyhole plan meta-llama/Llama-3.1-8B --gpu 24GiB --ram 64GiB --tokens 4x1024
    """
    from keyhole.training.plan_request import check_plan

    options = {"gpu": gpu, "ram": ram, "link": link, "tokens": tokens, "machine": machine}
    request = check_plan(model, overrides or [], steps=steps, measure=measure, **options)
    with imports():
        from keyhole.disk.json_text import json_text
        from keyhole.plan.advice import recommended
        from keyhole.plan.table import rows
        from keyhole.training.planning import ask

    question, said = ask(request, note)
    table = rows(question)
    chosen = recommended(table)
    if as_json:
        lines = [json_text([row.to_dict() | {"recommended": row is chosen} for row in table], indent=1)]
    else:
        lines = [*said, *_table(table, chosen), *_end(request, question, table, chosen)]
    typer.echo("\n".join(lines))


HEAD = (
    "", "method", "placement", "wire", "GPU GiB", "host GiB", "disk GiB", "s/step", "tok/s", "hours", "bound by",
    "fits",
)  # fmt: skip
TEXTS = (0, 1, 2, 3, 10, 11)  # columns


def _table(table: "list[Row]", chosen: "Row | None") -> list[str]:
    cells = [
        [
            "->" if row is chosen else "", row.method, row.placement, row.stored, f"{row.gpu_bytes / GIB:.2f}",
            f"{row.host_bytes / GIB:.1f}", f"{row.disk_bytes / GIB:.0f}", f"{row.step_seconds:.3g}",
            f"{row.tokens_per_second:,.0f}", f"{row.run_hours:.2g}", row.bound_by,
            "yes" if row.fits else f"lacks {row.missing}",
        ]
        for row in table
    ]  # fmt: skip
    return aligned([HEAD, *cells], left=TEXTS)


def _end(request: "PlanRequest", question: "Question", table: "list[Row]", chosen: "Row | None") -> list[str]:
    """The choice; and if the row that the config asks for, or every row, does not fit: what would."""
    from keyhole.plan.advice import cheapest_changes, reason, settings_of

    config, row = request.config, None
    lines = [
        f"hours: of {question.steps:,} steps, {question.steps * question.tokens_per_step:,} tokens (--steps)",
        *(
            f"{name}: a guess: {METHODS[name].steps:g} times the steps of adamw; {why}"
            for name in question.methods
            if (why := METHODS[name].evidence)
        ),
    ]
    if chosen is not None:
        lines.append(f"take: {settings_of(chosen, question)}: {reason(chosen, table)}")
    wanted = (config.method, config.placement, config.wire)
    asked = next((each for each in table if (each.method, each.placement, each.wire) == wanted), None)
    if request.names_method and asked is not None and not asked.fits:
        row = asked
        lines.append(f"method={row.method} placement={row.placement} does not fit; what would, cheapest first:")
    elif chosen is None:
        row = min(table, key=lambda each: (each.gpu_bytes, each.host_bytes))
        needs = f"{row.gpu_bytes / GIB:.2f} GiB, with {row.host_bytes / GIB:.1f} GiB of host memory"
        lines.append(f"nothing fits; the least GPU memory is that of {settings_of(row, question)}: {needs}.")
        lines.append("Changes of it that would fit, cheapest first:")
    if row is not None:
        changes = cheapest_changes(question, row.method, row.placement, row.wire)
        lines += [f"  {change}, {change.row.step_seconds:.3g} s per step" for change in changes] or [NOTHING]
    return lines
