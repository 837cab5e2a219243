"""keyhole eval DIR --tasks FILE ... [key=value ...] [--limit N] [--json FILE]"""

from typing import Annotated

import typer

from keyhole.cli.arguments import (
    ModelArgument,
    PlacementSettings,
    SettingsCommand,
    check_model,
    parse_placement,
    repeat_option,
)


class EvalCommand(SettingsCommand):
    """`--tasks` takes all the arguments that follow."""

    def rewrite(self, args: list[str]) -> list[str]:
        return repeat_option(args, "--tasks")


def eval(
    directory: ModelArgument,
    tasks: Annotated[list[str], typer.Option(metavar="FILE...", help="Task or data files, or demo.")],
    overrides: PlacementSettings = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only N rows of each file.")] = None,
    json_path: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the numbers here too.")] = None,
) -> None:
    """Score a model: validation loss, and tasks by log-likelihood.

    Example: keyhole eval out --tasks rte.jsonl held-out.jsonl gpu_memory=8GiB
    """
    settings = parse_placement(overrides, "max_length")
    check_model(directory)
    from keyhole.eval.evaluate import evaluate as run

    typer.echo(run(directory, tasks, limit=limit, json_path=json_path, **settings))
