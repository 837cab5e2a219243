"""keyhole eval DIR --tasks FILE ..."""

from typing import Annotated

import typer

from keyhole.cli.words import repeat_option


class EvalCommand(typer.core.TyperCommand):
    """`--tasks` takes all the words that follow."""

    def parse_args(self, ctx: object, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_option(args, "--tasks"))


def eval(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Model directory, or a hub id.")],
    tasks: Annotated[list[str], typer.Option(metavar="FILE...", help="Task or data files.")],
) -> None:
    """Score a model: validation loss, and tasks by log-likelihood."""
    from keyhole.eval import evaluate

    typer.echo(evaluate(directory, tasks))
