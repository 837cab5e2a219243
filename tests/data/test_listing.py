"""A list of sources that names other files than it seems to: one line for each mistake."""

from pathlib import Path

import pytest

from keyhole.data.prepare import prepare
from keyhole.data.sources import remarks, resolve
from keyhole.errors import UserError
from tests.data.chats import tokenizer


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_text(f'{{"text": "{name}"}}\n')
    return folder


def told(*sources: str) -> list[str]:
    return remarks(list(sources), resolve(list(sources)))


def test_hidden_files_of_a_directory_are_not_read(tmp_path: Path) -> None:
    """macOS writes `._a.jsonl` beside `a.jsonl`; a pattern leaves such files out too."""
    make(tmp_path, "a.jsonl", ".a.jsonl", "._a.jsonl")
    assert resolve([str(tmp_path)]) == resolve([f"{tmp_path}/*.jsonl"]) == [str(tmp_path / "a.jsonl")]
    assert told(str(tmp_path)) == []


def test_what_is_not_read_of_a_directory_is_named(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.jsonl.zst", "README.md")
    (tmp_path / "more").mkdir()
    (line,) = told(str(tmp_path))
    assert "not read: b.jsonl.zst, more/" in line
    assert told(f"{tmp_path}/a.jsonl") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": "a", "completion": "b"}\n', "begins with a JSON object"),
        ("id,text,label\n1,a,b\n", "begins with names of columns"),
        ("prompt\tcompletion\na\tb\n", "begins with names of columns"),
        ("The text, as it is.\n", ""),
        ("{ a brace, and more\n", ""),
        ("caf\u00e9".encode("latin-1").decode("latin-1"), ""),
    ],
)
def test_a_table_that_is_called_a_text_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    found = told(str(tmp_path / "a.txt"))
    assert [says in line for line in found] == [True] * bool(says)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    make(tmp_path, "x-00000-of-00003.jsonl", "x-00002-of-00003.jsonl", "y-00001-of-00001.jsonl")
    (line,) = told(f"{tmp_path}/*.jsonl")
    assert "x-*-of-00003.jsonl: only 2 of 3 parts are read" in line


def test_a_file_that_is_read_twice_is_named(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.jsonl")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "a.jsonl")
    (line,) = told(f"{tmp_path}/b.jsonl", f"{tmp_path}/*.jsonl")
    assert "a.jsonl (2 times)" in line and "b.jsonl (2 times)" in line


def test_a_directory_without_data_is_told_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.jsonl.zst").touch()
    with pytest.raises(UserError, match=r"holds no data file .*; it holds a.jsonl.zst, sub/"):
        resolve([str(tmp_path)])


def test_a_directory_with_several_splits_is_named(tmp_path: Path) -> None:
    """Training on the test set is reported; the line is part of the report of the data."""
    make(tmp_path, "train-0.jsonl", "sst2.test.jsonl", "contest.jsonl")
    (line,) = told(str(tmp_path))
    assert "files of test, train are all read" in line
    report = prepare(str(tmp_path), tokenizer()).report.lines()
    assert f"warning: {line}" in report
    assert told(f"{tmp_path}/*train*") == []
