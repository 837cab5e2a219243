"""keyhole demo [--output-dir DIR]"""

from typing import Annotated

import typer

from keyhole.machine.collector import imports


def demo(
    output_dir: Annotated[str, typer.Option(metavar="DIR", help="Where models and report go.")] = "demo-out",
) -> None:
    """Try every method on the embedded model: no GPU, no download.

    Takes about two minutes and ends with a table and an HTML report.
    """
    with imports():
        from keyhole.demo.run import run_demo

    run_demo(output_dir)
