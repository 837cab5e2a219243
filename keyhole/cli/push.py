"""keyhole push DIR ID [--private] [--dry-run]"""

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.arguments import note


def push(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The output_dir of a run, or a checkpoint in it.")],
    name: Annotated[str, typer.Argument(metavar="ID", help="Name on the hub: you/model, or model.")],
    private: Annotated[bool, typer.Option("--private", help="Only you may see it (of a new repository).")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card and the files; send nothing.")] = False,
) -> None:
    """Publish a trained model on the Hugging Face hub, with a card that says how it was made.

    Example: keyhole push out me/my-model --private
    """
    from keyhole.hub.push import check, check_id, files_of, text_of_card
    from keyhole.hub.push import push as run

    check_id(name, "ID")
    if dry_run:
        files = files_of(directory)
        check(directory)
        typer.echo(text_of_card(Path(directory), name))
        for file, path in files.items():
            note(f"{path.stat().st_size:>14,} bytes  {file}")
        return
    typer.echo(run(directory, name, private=True if private else None, say=note))
