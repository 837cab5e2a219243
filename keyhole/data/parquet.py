"""Rows of Parquet files.

A file may hold far more data than its size: a page that repeats one long text. So texts are read as dictionaries, which
store a repeated text once; a file whose metadata claim a thousand times its size is refused, and so is one whose rows
are a hundred times larger than the file (it stores a text once and uses it 10^4 times). The size of a batch is known
before it becomes Python objects: its bytes, where texts in dictionaries count as often as they occur. A large batch is
converted row by row, and a row above 16 MiB is refused.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole.data.opened import GROWTH_FROM, MOST_GROWTH, MOST_ROW_BYTES, Record, check_header
from keyhole.errors import UserError, printable

if TYPE_CHECKING:
    from pyarrow import Array
    from pyarrow.parquet import FileMetaData

ROWS_AT_ONCE = 64
MOST_VALUES_PER_BYTE, ROWS_GROWTH = 16, 100


def read_parquet(path: Path) -> Iterator[Record]:
    """The rows of a Parquet file."""
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    number = total = 0
    most = max(MOST_ROW_BYTES, ROWS_GROWTH * path.stat().st_size)
    try:
        with parquet.ParquetFile(path) as file:
            check_header(path, file.schema_arrow.names)
            texts = _check(path, file.metadata)
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                weight = sum(map(_weight, batch.columns))
                single = weight > MOST_ROW_BYTES
                total += weight
                for part in [batch.slice(i, 1) for i in range(batch.num_rows)] if single else [batch]:
                    if single and (alone := sum(map(_weight, part.columns))) > MOST_ROW_BYTES:
                        raise UserError(
                            f"{path}, row {number + 1}: {alone:,} bytes; a row has at most {MOST_ROW_BYTES:,}"
                        )
                    if total > most:
                        raise UserError(
                            f"{path}: its rows hold more than {most:,} bytes, {ROWS_GROWTH} times the file: no text "
                            "can be compressed like that; write it without repetition"
                        )
                    for row in part.to_pylist():
                        number += 1
                        yield Record(str(path), "row", number, {name: nested(value) for name, value in row.items()})
    except (ArrowException, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a readable Parquet file (after row {number}): {error}") from None


def _check(path: Path, about: "FileMetaData") -> list[str]:
    """Refuses a file whose metadata claim far more data than its size; returns the text columns."""
    bytes_in_file, texts = path.stat().st_size, set()
    values: Counter[str] = Counter()
    grown: Counter[str] = Counter()
    for group in (about.row_group(i) for i in range(about.num_row_groups)):
        for column in (group.column(i) for i in range(group.num_columns)):
            name = column.path_in_schema
            values[name] += column.num_values
            grown[name] += column.total_uncompressed_size
            texts |= {name} if column.physical_type == "BYTE_ARRAY" else set()
    for name in values:
        too_large = grown[name] > GROWTH_FROM and grown[name] > MOST_GROWTH * bytes_in_file
        if too_large or (values[name] > 2**20 and values[name] > MOST_VALUES_PER_BYTE * bytes_in_file):
            raise UserError(
                f"{path}: column {printable(name, 80)} has {values[name]:,} values, {grown[name]:,} bytes unpacked, in "
                f"a file of {bytes_in_file:,}: no text can be compressed like that; write it without repetition"
            )
    return sorted(texts)


def _weight(column: "Array") -> int:
    """Bytes of an array; each text of a dictionary counts as often as it is used."""
    import pyarrow
    import pyarrow.compute as compute

    kind, of = column.type, pyarrow.types
    if isinstance(kind, pyarrow.ExtensionType):
        return _weight(column.storage)
    if of.is_dictionary(kind) and not of.is_primitive(kind.value_type):
        return compute.sum(compute.binary_length(column.dictionary).take(column.indices)).as_py() or 0
    if of.is_map(kind):
        return 8 * len(column) + _weight(column.keys) + _weight(column.items)
    if of.is_struct(kind):
        return sum(map(_weight, column.flatten()))
    if of.is_nested(kind):
        return 8 * len(column) + _weight(column.flatten())
    return int(column.nbytes)


def nested(value: Any) -> Any:
    """The value without nested keys that are null; a map, which Arrow gives as a list of pairs, as an object."""
    if isinstance(value, list) and value and all(type(x) is tuple and len(x) == 2 and type(x[0]) is str for x in value):
        if len(found := dict(value)) != len(value):
            raise ValueError("a map has the same key twice")
        value = found
    if isinstance(value, dict):
        return {key: nested(item) for key, item in value.items() if item is not None}
    return [nested(item) for item in value] if isinstance(value, list) else value
