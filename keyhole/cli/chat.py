"""keyhole chat DIR"""

from typing import Annotated

import typer


def chat(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Model directory, or a hub id.")],
) -> None:
    """Talk to a model."""
    from keyhole.eval.chat import chat as run

    run(directory)
