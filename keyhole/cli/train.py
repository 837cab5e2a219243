"""What takes a CONFIG and settings:

keyhole train CONFIG [key=value ...] [--resume [PATH]] [--dry-run] [--allow-code-execution]
keyhole data CONFIG [key=value ...] [-n 3]
"""

import sys
from typing import Annotated

import typer

from keyhole.cli.arguments import (
    AllowCode,
    ConfigArgument,
    Overrides,
    SettingsCommand,
    check_model,
    load_settings,
    with_resume_value,
)
from keyhole.machine.collector import imports
from keyhole.methods import METHODS
from keyhole.ranks.join import joined

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
        str | None,
        typer.Option(metavar="[PATH]", help="Go on from a checkpoint: the last one in output_dir, or PATH."),
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
    from keyhole.config.data import data_settings
    from keyhole.data.sources import check_sources

    asked = data_settings(settings)
    check_sources(asked)
    with imports():
        import transformers.models.auto.tokenization_auto  # noqa: F401, every preview needs it

        from keyhole.data.run import preview_data

    typer.echo(preview_data(asked, count, color=sys.stdout.isatty()))
