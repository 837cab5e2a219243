"""Rows of original files: quotes that mean nothing, broken lines, no header, Latin-1."""

import csv
import gzip
import io
import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.data.opened import MOST_ROW_BYTES
from keyhole.data.readers import read_file
from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.tables import read_rows
from keyhole.errors import UserError


def rows(path: Path, task: str) -> tuple[list[dict], Counter[str]]:
    left_out: Counter[str] = Counter()
    return [record.row for record in read_rows(str(path), read_spec(task), left_out)], left_out


def test_quotes_in_tsv_are_letters(tmp_path: Path) -> None:
    """GLUE's files have lone quotation marks, and carriage returns."""
    (tmp_path / "a.tsv").write_bytes(b'sentence\tlabel\r\n"so so\t0\r\nthe "best"\t1\r\n')
    assert rows(tmp_path / "a.tsv", "sst2")[0] == [
        {"sentence": '"so so', "label": "0"},
        {"sentence": 'the "best"', "label": "1"},
    ]


def test_a_few_broken_lines_are_left_out(tmp_path: Path) -> None:
    good = "good\t1\n"
    (tmp_path / "a.tsv").write_text("sentence\tlabel\n" + good * 200 + "broken\n" + good)
    found, left_out = rows(tmp_path / "a.tsv", "sst2")
    assert len(found) == 201 and left_out["broken"] == 1
    (tmp_path / "b.tsv").write_text("sentence\tlabel\n" + good * 20 + "broken\n")
    with pytest.raises(UserError, match="1 of 21 lines do not have 2 cells"):
        rows(tmp_path / "b.tsv", "sst2")


def test_a_file_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("gj04\t0\t*\tThem went.\n")
    assert rows(tmp_path / "train.tsv", "cola")[0] == [
        {"source": "gj04", "label": "0", "mark": "*", "sentence": "Them went."}
    ]
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\tThem went.\n")
    assert rows(tmp_path / "test.tsv", "cola")[0] == [{"index": "0", "sentence": "Them went."}]
    (tmp_path / "bad.tsv").write_text("0\tThem went.\n")
    with pytest.raises(UserError, match="without a header has 4"):
        rows(tmp_path / "bad.tsv", "cola")


HEAD = b"sentence,label\n"
LINES = (b"a" * 999 + b"\n") * (MOST_ROW_BYTES // 1000 + 9)
TSV = b"sentence\tlabel\n" + b"".join(f"good {i * i}\t1\n".encode() for i in range(300))
JSON = json.dumps([{"sentence": f"good {i * i}", "label": 1} for i in range(300)]).encode()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", HEAD + b"good,1\n" * 3 + b'"oops,1\n' + b"good,1\n" * 9, "line 5: not valid CSV"),
        ("a.csv", HEAD + b'"' + LINES + b'",1\n', "line 2: not valid CSV: field larger"),
        ("a.csv", HEAD + b"a" * (MOST_ROW_BYTES + 9) + b",1\n", "line 2: longer than"),
        ("a.tsv", "sentence\tlabel\ncaf\u00e9\t1\n".encode() + b"bad\xff\t1\n", "line 3: not UTF-8"),
        ("a.csv", "sentence,label\ncaf\u00e9,1\n".encode() + b"bad\xff,1\n", "line 3: not UTF-8"),
        ("a.tsv", b"sentence\tlabel\tlabel\na\t1\t0\n", "two columns are called label"),
        ("a.csv", b"sentence,label,label\na,1,0\n", "two columns are called label"),
        ("a.tsv.gz", gzip.compress(TSV)[:200], "cannot be unpacked"),
        ("a.tsv.gz", b"hello", "cannot be read: Not a gzipped file"),
        ("a.json.gz", gzip.compress(JSON)[:200], "cannot be unpacked"),
        ("a.json", '[{"sentence": "caf\u00e9", "label": 1}]'.encode("latin-1"), "line 1: not UTF-8"),
        ("a.label.gz", b"hello", "cannot be read: Not a gzipped file"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}.*{says}"):
        rows(tmp_path / name, "sst2")


SPELLED = [{"sentence": 'What is "x"?', "label": "1"}, {"sentence": "two\nlines", "label": "0"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'sentence;label\n"What is ""x""?";1\n"two\nlines";0\n'),
        ("a.csv", 'sentence\tlabel\n"What is ""x""?"\t1\n"two\nlines"\t0\n'),
        ("a.tsv", 'sentence\tlabel\n"What is ""x""?"\t1\n"two\nlines"\t0\n'),
        ("a.tsv", '"sentence"\t"label"\n"What is ""x""?"\t"1"\n"two\nlines"\t"0"\n'),
    ],
)
def test_delimiter_and_quoting_as_the_file_has_them(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert rows(tmp_path / name, "sst2")[0] == SPELLED
    assert [record.row for record in read_file(tmp_path / name)] == SPELLED


@settings(max_examples=30)
@given(st.lists(st.tuples(st.text(max_size=9), st.text('ab"\t\n', max_size=9)), min_size=1, max_size=6))
def test_a_quoted_table_comes_back(pairs: list[tuple[str, str]]) -> None:
    pairs = [(a.replace("\0", ""), b) for a, b in pairs]
    for name, delimiter in (("a.tsv", "\t"), ("a.csv", ","), ("b.csv", ";"), ("c.csv", "\t")):
        out = io.StringIO()
        writer = csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL)
        writer.writerows([("sentence", "label"), *pairs])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(out.getvalue().encode(errors="replace"))
            found = [(row["sentence"], row["label"]) for row in rows(path, "sst2")[0]]
        assert found == [(a.encode(errors="replace").decode(), b) for a, b in pairs]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"sentence,label\ngood,1\n", "line 1: no tab, but commas: this looks like CSV; rename the file to .csv"),
        (b"sentence\tlabel\ngo\0od\t1\n", "line 2: a NUL character"),
    ],
)
def test_what_a_table_cannot_be(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.tsv").write_bytes(content)
    with pytest.raises(UserError, match=says):
        rows(tmp_path / "a.tsv", "sst2")
    with pytest.raises(UserError, match=says):
        list(read_file(tmp_path / "a.tsv"))
