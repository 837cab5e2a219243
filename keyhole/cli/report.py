"""keyhole report DIR... [--output FILE]"""

from pathlib import Path
from typing import Annotated

import typer


def report(
    directories: Annotated[
        list[str], typer.Argument(metavar="DIR...", help="output_dir of runs, or directories that hold several.")
    ],
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The page.")] = "report.html",
) -> None:
    """Lay runs side by side: a table, and a page with their curves and the settings that differ.

    A run's own page is run/report.html in its output_dir.

    Example: keyhole report out/lomo out/zo -o compared.html
    """
    from keyhole.disk.files import write_text
    from keyhole.disk.json_text import check_result_file
    from keyhole.errors import UserError
    from keyhole.report.compared import make_page, name_runs, table
    from keyhole.report.story import find_runs, read_view

    path = Path(output)
    check_result_file("--output", path)
    found = find_runs([Path(directory) for directory in directories])
    views = [read_view(directory, name) for directory, name in zip(found, name_runs(found), strict=True)]
    for line in table(views):
        typer.echo(line)
    try:
        write_text(path, make_page(views, path.absolute().parent))
    except OSError as error:
        raise UserError(f"--output: {path} cannot be written: {error.strerror or error}") from error
    typer.echo(f"page: {path}")
