"""keyhole eval DIR --tasks NAME ... [key=value ...] [--task-data DIR] [--limit N] [--json FILE]"""

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
    tasks: Annotated[
        list[str], typer.Option(metavar="NAME...", help="Tasks by name (sst2,rte), task or data files, demo.")
    ],
    overrides: PlacementSettings = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only N rows of each file.")] = None,
    task_data: Annotated[
        str | None, typer.Option("--task-data", metavar="DIR", help="Directory with a folder of files for each task.")
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run programs that the model writes (humaneval).")
    ] = False,
    json_path: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the numbers here too.")] = None,
) -> None:
    """Score a model: validation loss, and tasks by log-likelihood.

    Example: keyhole eval out --tasks sst2,rte held-out.jsonl --task-data data gpu_memory=8GiB
    """
    settings = parse_placement(overrides, "max_length", "num_eval", "task_data", "task_splits")
    settings |= {"task_data": task_data} if task_data is not None else {}
    settings |= {"allow_code_execution": True} if allow_code else {}
    check_model(directory)
    from keyhole.eval.evaluate import evaluate as run

    typer.echo(run(directory, tasks, limit=limit, json_path=json_path, **settings))
