"""keyhole replay BASE JOURNAL OUT [--steps N] [key=value ...]"""

from pathlib import Path
from typing import Annotated

import typer

from keyhole.checkpoint.journal import check_journal, check_out
from keyhole.config.loader import parse_settings
from keyhole.machine.collector import imports


def replay(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model that the run started from, or demo.")],
    journal: Annotated[str, typer.Argument(metavar="JOURNAL", help="The run's output_dir, or its run/journal.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new directory for the rebuilt model.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings: device, placement, gpu_memory."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rebuild the weights after N steps; default: all.")
    ] = None,
) -> None:
    """Rebuild a zeroth-order run's weights from its journal.

    Example: keyhole replay facebook/opt-1.3b out/run/journal rebuilt device=cpu
    """
    where = parse_settings(overrides or (), ("device", "placement", "gpu_memory"))
    check_journal(Path(journal))
    check_out(Path(out))
    with imports():
        from keyhole.checkpoint.replay import replay as run

    done = run(base, Path(journal), Path(out), steps=steps, say=typer.echo, **where)
    where_to = f"{out}, and its adapters in {beside}: load both" if (beside := Path(out) / "adapter").is_dir() else out
    typer.echo(f"{done.steps} steps replayed in {done.seconds:.1f} s ({done.total_seconds:.1f} s in all): {where_to}")
