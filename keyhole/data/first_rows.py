"""What the first row of a file decides: its layout; and a look at first rows before torch is imported.

A file that is empty, is not JSON, or has other columns than the settings name, is the usual mistake about data. Its
first row shows it, within milliseconds; the rows after it are checked when they are read (prepare.py), by the same
functions and with the same messages.
"""

from pathlib import Path

from keyhole.data.files import no_rows, resolve
from keyhole.data.formats import COLUMNS, detect, normalise, rename
from keyhole.data.opened import kind_of
from keyhole.data.readers import read_file
from keyhole.data.record import Record
from keyhole.data.row_template import filled
from keyhole.data.settings import AUTO, TABLE, PrepareSettings

BY_LINE = (".jsonl", ".ndjson", ".csv")  # the first row takes as long in a file of any size
WHOLE, WHOLE_BYTES = (".json", ".tsv"), 2**20  # the reader looks at more of the file


def check_first_rows(sources: list[str], how: PrepareSettings) -> None:
    """Refuses files that are empty, and first rows that cannot be trained on."""
    for path in map(Path, resolve(sources)):
        kind = kind_of(path) if path.is_file() else ""
        if kind in BY_LINE or (kind in WHOLE and path.stat().st_size <= WHOLE_BYTES):
            first = next(read_file(path), None)
            if first is None:
                raise no_rows(str(path))
            record = with_columns(first, how)
            normalise(record, layout_of(record, how)[0])


def with_columns(record: Record, how: PrepareSettings) -> Record:
    """The row with the columns that the settings rename or make."""
    record = rename(record, how.columns) if how.columns else record
    return filled(record, how.row_templates) if how.row_templates else record


def layout_of(record: Record, how: PrepareSettings) -> tuple[str, str]:
    """(layout, reason) of a file, from its first row."""
    given = how.data_format not in (None, AUTO)
    layout = TABLE if how.row_templates else str(how.data_format) if given else detect(record)
    if record.is_document:
        return layout, "plain text: one document, or several between lines of <|endoftext|>"
    if how.row_templates:
        return layout, f"{' and '.join(how.row_templates)} from columns"
    return layout, "data_format is set" if given else f"found column {', '.join(COLUMNS[layout])}"
