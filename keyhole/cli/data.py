"""keyhole data CONFIG [key=value ...] [-n 3]"""

import sys
from typing import Annotated

import typer

from keyhole.cli.arguments import ConfigArgument, Overrides, check_model, load_settings
from keyhole.machine.collector import imports
from keyhole.methods import METHODS

STAND_INS = {
    "method": next(iter(METHODS)),
    "output_dir": "not-written",
    "max_steps": 1,
}  # samples do not depend on them


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
