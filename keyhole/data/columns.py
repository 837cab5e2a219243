"""Rows of files that are stored by column: Parquet, and Arrow as Hugging Face's `save_to_disk` writes it.

A file may hold far more data than its size: a page that repeats one long text. So texts are read as dictionaries, which
store a repeated text once, and a file whose metadata claim a thousand times its size is refused. The size of a batch of
64 rows is estimated before it becomes Python objects: its bytes, where texts in dictionaries count as often as they
occur. A large batch is converted row by row, and a row above 16 MiB is refused. A file whose rows so far are a hundred
times larger than the file is refused too: it stores a text once and uses it 10^4 times.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keyhole.data.opened import GROWTH_FROM, MOST_GROWTH, MOST_ROW_BYTES
from keyhole.data.record import Record, check_header
from keyhole.errors import UserError, printable

ROWS_AT_ONCE = 64
MOST_VALUES_PER_BYTE, ROWS_GROWTH = 16, 100


def read_parquet(path: Path) -> Iterator[Record]:
    """The rows of a Parquet file."""
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            check_header(path, file.schema_arrow.names)
            texts = _check(path, file.metadata)
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            scales = _Scales(path)
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                for row in _rows(path, batch, number, scales):
                    number += 1
                    yield Record(str(path), "row", number, row)
    except (ArrowException, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a readable Parquet file (after row {number}): {error}") from None


def read_arrow(path: Path) -> Iterator[Record]:
    """The rows of an Arrow file, in the stream or the file format."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: reading Arrow needs pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with pyarrow.memory_map(str(path)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            opened = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source)
            check_header(path, opened.schema.names)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches)) if is_file else iter(opened)
            scales = _Scales(path)
            for whole in batches:
                for start in range(0, whole.num_rows, ROWS_AT_ONCE):
                    for row in _rows(path, whole.slice(start, ROWS_AT_ONCE), number, scales):
                        number += 1
                        yield Record(str(path), "row", number, row)
    except (pyarrow.ArrowException, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a readable Arrow file (after row {number}): {error}") from None


def _check(path: Path, about: Any) -> list[str]:
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


class _Scales:
    """Sums up the sizes of rows, and refuses a file with far more data than its size."""

    def __init__(self, path: Path) -> None:
        self.path, self.total = path, 0
        self.most = max(MOST_ROW_BYTES, ROWS_GROWTH * path.stat().st_size)

    def add(self, weight: int) -> None:
        self.total += weight
        if self.total > self.most:
            raise UserError(
                f"{self.path}: its rows hold more than {self.most:,} bytes, {ROWS_GROWTH} times the file: no text can "
                "be compressed like that; write it without repetition"
            )


def _rows(path: Path, batch: Any, before: int, scales: _Scales) -> Iterator[dict[str, Any]]:
    """The rows of a batch, none of them above the limit."""
    weight = sum(map(_weight, batch.columns))
    rows = [batch] if weight <= MOST_ROW_BYTES else [batch.slice(i, 1) for i in range(batch.num_rows)]
    for number, row in enumerate(rows if weight > MOST_ROW_BYTES else [], before + 1):
        if (alone := sum(map(_weight, row.columns))) > MOST_ROW_BYTES:
            raise UserError(f"{path}, row {number}: {alone:,} bytes; a row has at most {MOST_ROW_BYTES:,}")
    scales.add(weight)
    for part in rows:
        yield from map(_without_nulls, part.to_pylist())


def _weight(column: Any) -> int:
    """Bytes of an array; each text of a dictionary counts as often as it is used."""
    import pyarrow
    import pyarrow.compute as compute

    kind = column.type
    if isinstance(kind, pyarrow.ExtensionType):
        return _weight(column.storage)
    if pyarrow.types.is_dictionary(kind):
        if pyarrow.types.is_primitive(kind.value_type):
            return 8 * len(column)
        size = compute.binary_length(column.dictionary)
        return compute.sum(size.take(column.indices)).as_py() or 0
    if pyarrow.types.is_map(kind):
        return 8 * len(column) + _weight(column.keys) + _weight(column.items)
    if pyarrow.types.is_struct(kind):
        return sum(_weight(part) for part in column.flatten())
    if pyarrow.types.is_nested(kind) and hasattr(column, "flatten"):
        return 8 * len(column) + _weight(column.flatten())
    return int(column.nbytes)


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    return {name: nested(value) for name, value in row.items()}


def nested(value: Any) -> Any:
    """The value without nested keys that are null; a map, which Arrow gives as a list of pairs, as an object."""
    if isinstance(value, list) and value and all(map(_is_pair, value)):
        if len(found := dict(value)) != len(value):
            raise ValueError("a map has the same key twice")
        value = found
    if isinstance(value, dict):
        return {key: nested(item) for key, item in value.items() if item is not None}
    return [nested(item) for item in value] if isinstance(value, list) else value


def _is_pair(item: Any) -> bool:
    return type(item) is tuple and len(item) == 2 and isinstance(item[0], str)
