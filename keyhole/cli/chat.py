"""keyhole chat DIR [key=value ...] [--system TEXT] [--plain] [--max-new-tokens N]"""

from typing import Annotated

import typer

from keyhole.cli.arguments import ModelArgument, PlacementSettings, check_model, parse_placement
from keyhole.machine.collector import imports


def chat(
    directory: ModelArgument,
    overrides: PlacementSettings = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Continue each text as it stands, without the chat template.")
    ] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Longest answer in tokens.")] = None,
) -> None:
    """Talk to a model, also to one that is larger than the GPU.

    Example: keyhole chat out gpu_memory=8GiB
    """
    settings = parse_placement(overrides)
    check_model(directory)
    with imports():
        from keyhole.eval.conversation import chat as run

    run(directory, system=system, max_new_tokens=max_new_tokens, plain=plain, **settings)
