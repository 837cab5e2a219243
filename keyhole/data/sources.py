"""What the settings of data name, checked before torch is imported; and the layout of a file, from its first row.

A file that is missing or empty, is not JSON, or has other columns than the settings name, is the usual mistake about
data. Its name and its first row show it, within milliseconds; the rows after it are checked when they are read
(prepare.py), by the same functions and with the same messages. Of tasks it is checked that they exist, have their files
and support the loss; what reads tasks is imported only for them.
"""

from pathlib import Path

from keyhole.data.files import no_rows, resolve
from keyhole.data.formats import COLUMNS, TABLE, detect, filled, normalise, rename
from keyhole.data.opened import Record, kind_of
from keyhole.data.readers import read_file
from keyhole.data.settings import AUTO, DataSettings
from keyhole.disk.json_text import read_json
from keyhole.errors import UserError
from keyhole.model.structure.source import names_classifier

BY_LINE = (".jsonl", ".ndjson", ".csv")  # the first row takes as long in a file of any size
WHOLE, WHOLE_BYTES = (".json", ".tsv"), 2**20  # the reader looks at more of the file


def check_sources(settings: DataSettings) -> None:
    """Refuses missing files, patterns and folders, first rows that cannot be trained on, unknown tasks, and a loss that
    a task does not support."""
    given = [source for source in (settings.train_data, settings.eval_data) if source]
    files = [resolve([source] if isinstance(source, str) else source) for source in given]
    _ = settings.template_text
    for path in () if _classifies(settings.model) else (Path(name) for names in files for name in names):
        kind = kind_of(path) if path.is_file() else ""
        if kind in BY_LINE or (kind in WHOLE and path.stat().st_size <= WHOLE_BYTES):
            first = next(read_file(path), None)
            if first is None:
                raise no_rows(str(path))
            record = with_columns(first, settings)
            normalise(record, layout_of(record, settings)[0])
    if settings.task or settings.test_task:
        from keyhole.data.tasks.parse import read_spec
        from keyhole.data.tasks.places import find_splits
        from keyhole.data.tasks.spec import check_loss, check_names, listed_names, own_splits

        train, test = listed_names(settings.task), listed_names(settings.test_task)
        check_names([*train, *test], settings.task_splits)
        for name in (*train, *test):
            spec = read_spec(name)
            if name in train:
                check_loss(spec, settings.loss)
            find_splits(spec, settings.task_data, own_splits(settings.task_splits, spec.name))


def _classifies(model: str) -> bool:
    """Whether the model in a directory is a classifier: its labels come from a task, as is said when it is read."""
    try:
        return names_classifier(read_json(Path(model) / "config.json", "model"))
    except UserError:  # a hub id, or a model that will be refused
        return False


def with_columns(record: Record, how: DataSettings) -> Record:
    """The row with the columns that the settings rename or make."""
    record = rename(record, how.columns) if how.columns else record
    return filled(record, how.row_templates) if how.row_templates else record


def layout_of(record: Record, how: DataSettings) -> tuple[str, str]:
    """(layout, reason) of a file, from its first row."""
    given = how.data_format not in (None, AUTO)
    layout = TABLE if how.row_templates else str(how.data_format) if given else detect(record)
    if record.is_document:
        return layout, "plain text: one document, or several between lines of <|endoftext|>"
    if how.row_templates:
        return layout, f"{' and '.join(how.row_templates)} from columns"
    return layout, "data_format is set" if given else f"found column {', '.join(COLUMNS[layout])}"
