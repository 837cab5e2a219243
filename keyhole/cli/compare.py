"""keyhole compare [FILE] [key=value ...] [--dry-run] [--retry] [--allow-code-execution]"""

from typing import Annotated

import typer

from keyhole.machine.collector import imports


def compare(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="YAML file, or a shipped comparison; without it, their list.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="model=DIR, task_data=DIR, output_dir=DIR, tasks=, methods=, seeds=, "
            "and any setting of `keyhole train`, for all runs.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs, and stop.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed before.")] = False,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run programs that models write (humaneval), confined.")
    ] = False,
) -> None:
    """Compare methods: models x tasks x methods x settings x seeds, as a table and a page.

    Example: keyhole compare smollm2-sst2 model=DIR task_data=DIR output_dir=out
    """
    from keyhole.compare.file import comparisons, find_comparison, read_comparison
    from keyhole.config.recipes import title

    if file is None:
        width = max(map(len, comparisons()))
        for name, path in comparisons().items():
            typer.echo(f"{name:<{width}}  {title(path)}")
        return
    comparison = read_comparison(find_comparison(file), overrides or ())
    with imports():
        from keyhole.compare.execute import compare as run

    how = {"dry_run": dry_run, "retry": retry, "allow_code_execution": allow_code_execution}
    raise typer.Exit(run(comparison, say=typer.echo, **how))
