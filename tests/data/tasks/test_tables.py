"""Rows of original files: quotes that mean nothing, broken lines, no header, Latin-1."""

from collections import Counter
from pathlib import Path

import pytest

from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.tables import read_rows
from keyhole.errors import UserError


def rows(path: Path, task: str) -> tuple[list[dict], Counter[str]]:
    left_out: Counter[str] = Counter()
    return [record.row for record in read_rows(path, read_spec(task), left_out)], left_out


def test_quotes_in_tsv_are_letters(tmp_path: Path) -> None:
    """GLUE's files have lone quotation marks, and carriage returns."""
    (tmp_path / "a.tsv").write_bytes(b'sentence\tlabel\r\n"so so\t0\r\nthe "best"\t1\r\n')
    assert rows(tmp_path / "a.tsv", "sst2")[0] == [
        {"sentence": '"so so', "label": "0"},
        {"sentence": 'the "best"', "label": "1"},
    ]


def test_a_few_broken_lines_are_left_out(tmp_path: Path) -> None:
    """One in a hundred at most, and counted; more are refused."""
    good = "good\t1\n"
    (tmp_path / "a.tsv").write_text("sentence\tlabel\n" + good * 200 + "broken\n" + good)
    found, left_out = rows(tmp_path / "a.tsv", "sst2")
    assert len(found) == 201 and left_out["broken"] == 1
    (tmp_path / "b.tsv").write_text("sentence\tlabel\n" + good * 20 + "broken\n")
    with pytest.raises(UserError, match="1 of 21 lines do not have 2 cells"):
        rows(tmp_path / "b.tsv", "sst2")


def test_a_file_without_a_header(tmp_path: Path) -> None:
    """CoLA's first line is a row; its test file has a header; another number of cells is refused."""
    (tmp_path / "train.tsv").write_text("gj04\t0\t*\tThem went.\n")
    assert rows(tmp_path / "train.tsv", "cola")[0] == [
        {"source": "gj04", "label": "0", "mark": "*", "sentence": "Them went."}
    ]
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\tThem went.\n")
    assert rows(tmp_path / "test.tsv", "cola")[0] == [{"index": "0", "sentence": "Them went."}]
    (tmp_path / "bad.tsv").write_text("0\tThem went.\n")
    with pytest.raises(UserError, match="without a header has 4"):
        rows(tmp_path / "bad.tsv", "cola")


def test_lines_in_latin_1(tmp_path: Path) -> None:
    """TREC's file has one question per line and is older than UTF-8."""
    (tmp_path / "train_5500.label").write_bytes("DESC:def What is a ma\xeetre d ?\n".encode("latin-1"))
    assert rows(tmp_path / "train_5500.label", "trec")[0] == [{"line": "DESC:def What is a maître d ?"}]
