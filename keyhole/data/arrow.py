"""Reads the rows of Parquet files, and of directories that `save_to_disk` of `datasets` wrote, with pyarrow alone.

pyarrow trusts what it reads: a wrong offset in a file ends the process (SIGSEGV; SIGBUS where the file is mapped), or
gives bytes beside a text as text. So these functions run in another process (readers.py), files are read and not
mapped, every batch is validated in full (offsets within their buffers, valid UTF-8, indices within their dictionary),
and an Arrow file must be read to its end, which its writer marks. Neither format has checksums of its own here: a
letter that was replaced by another one is a text as well.

Memory: of Parquet BUFFER_BYTES per column and ROWS_AT_ONCE rows; of Arrow a batch as it was written (1,000 rows), which
is validated whole.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.data.opened import MOST_ROW_BYTES, Record, check_header
from keyhole.disk.json_text import read_json
from keyhole.errors import UserError, as_user_error

if TYPE_CHECKING:
    from pyarrow import RecordBatch

ROWS_AT_ONCE, ROWS_GROWTH, BUFFER_BYTES = 64, 100, 2**20  # rows in memory, and characters for a byte of the file
END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow file

Batches = Callable[[Path], "Iterator[RecordBatch]"]


def read_parquet(path: Path) -> Iterator[Record]:
    return _records([path], path, "Parquet", _of_parquet)


def read_saved(folder: Path) -> Iterator[Record]:
    """The rows of a directory that `save_to_disk` of `datasets` wrote: of its split "train", if it has several."""
    inside = folder / "train" if os.path.exists(folder / "dataset_dict.json") else folder
    state = read_json(inside / "state.json", str(folder))
    with as_user_error(f"{inside}: state.json does not say which files hold the rows"):
        files = [inside / Path(each["filename"]).name for each in state["_data_files"]]
    if state.get("_indices_data_files"):
        raise UserError(f"{inside}: an old version of `datasets` left indices beside the rows; save it again with it")
    for record in _records(files, folder, "Arrow", _of_stream):
        yield replace(record, row={name: record.row[name] for name in state.get("_format_columns") or record.row})


def _of_parquet(path: Path) -> "Iterator[RecordBatch]":
    from pyarrow import parquet

    with parquet.ParquetFile(path, buffer_size=BUFFER_BYTES) as file:
        check_header(path, file.schema_arrow.names)
        yield from file.iter_batches(batch_size=ROWS_AT_ONCE, use_threads=False)


def _of_stream(path: Path) -> "Iterator[RecordBatch]":
    import pyarrow

    with pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as batches:
        check_header(path, batches.schema.names)
        yield from batches
        if file.tell() != file.size() or file.read_at(len(END), file.size() - len(END)) != END:
            raise ValueError("it has no end, or goes on behind it")


def _records(files: list[Path], name: Path, kind: str, batches_of: Batches) -> Iterator[Record]:
    """The rows of files that are read as batches. name: what messages call them."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError(f"{name}: reading {kind} needs pyarrow: pip install pyarrow") from None
    number = total = 0
    most = max(MOST_ROW_BYTES, ROWS_GROWTH * sum(path.stat().st_size for path in files))
    try:
        for batch in (batch for path in files for batch in batches_of(path)):
            batch.validate(full=True)
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                rows = batch.slice(start, ROWS_AT_ONCE).to_pylist()
                total += sum(len(value) for row in rows for value in row.values() if isinstance(value, str))
                if total > most:
                    raise UserError(
                        f"{name}: its rows hold more than {most:,} characters, {ROWS_GROWTH} times the file: no text "
                        "can be compressed like that; write it without repetition"
                    )
                for row in rows:
                    number += 1
                    yield Record(str(name), "row", number, {name: nested(value) for name, value in row.items()})
    except (UserError, MemoryError):
        raise
    except Exception as error:  # the library's, which have no common type: KeyError for a damaged name
        raise UserError(f"{name}: not a readable {kind} file (after row {number}): {error!r:.300}") from None


def nested(value: object) -> object:
    """The value without nested keys that are null; a map, which Arrow gives as a list of pairs, as an object."""
    if isinstance(value, list) and value and all(type(x) is tuple and len(x) == 2 and type(x[0]) is str for x in value):
        if len(found := dict(value)) != len(value):
            raise ValueError("a map has the same key twice")
        value = found
    if isinstance(value, dict):
        return {key: nested(item) for key, item in value.items() if item is not None}
    return [nested(item) for item in value] if isinstance(value, list) else value
