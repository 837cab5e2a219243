"""keyhole train CONFIG [key=value ...] [--resume [PATH]] [--dry-run] [--allow-code-execution]"""

from typing import Annotated

import typer

from keyhole.cli.arguments import (
    ConfigArgument,
    Overrides,
    SettingsCommand,
    check_model,
    load_settings,
    with_resume_value,
)
from keyhole.ranks.join import joined

LAST = "last"


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
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run programs that the model writes (humaneval), confined.")
    ] = False,
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
