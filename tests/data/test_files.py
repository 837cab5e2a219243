"""Every kind of file gives the same rows, and a broken one is named with its line."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.data.files import SUFFIXES, read
from keyhole.errors import UserError

ROWS = [
    {"prompt": 'a, "b"\nc', "completion": "\u00e9"},
    {"prompt": "x\ty", "completion": "line one\nline two"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows in the kind of file that the suffix says."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(source: str | list[str]) -> list[dict[str, Any]]:
    return [record.row for record in read(source)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    """JSON, JSONL, CSV, TSV and Parquet hold the same rows, quotes, tabs and line breaks included."""
    path = write(tmp_path / f"data{suffix}", ROWS)
    records = list(read(str(path)))
    assert [record.row for record in records] == ROWS
    assert [record.number for record in records] == [1, 2]
    assert records[1].where.startswith(f"{path}, ")


def test_globs_directories_and_lists(tmp_path: Path) -> None:
    """Files come in sorted order; a directory's other files are left alone."""
    for i in (2, 0, 1):
        write(tmp_path / f"part{i}.jsonl", [{"text": str(i)}])
    (tmp_path / "notes.md").write_text("no data")
    expected = [{"text": "0"}, {"text": "1"}, {"text": "2"}]
    assert rows(str(tmp_path)) == rows(f"{tmp_path}/part*.jsonl") == expected
    assert rows([f"{tmp_path}/part2.jsonl", f"{tmp_path}/part0.jsonl"]) == [expected[2], expected[0]]


def test_json_that_is_jsonl_after_all(tmp_path: Path) -> None:
    """One object per line in a .json file is read as meant, blank lines and byte order mark included."""
    path = tmp_path / "data.json"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "a"}\n\n{"text": "b"}\n')
    assert [(r.row["text"], r.where) for r in read(str(path))] == [
        ("a", f"{path}, line 1"),
        ("b", f"{path}, line 3"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": b}\n', r"a.jsonl, line 2: not valid JSON: .* at column 10"),
        ("a.jsonl", '{"text": "a"}\n["b"]\n', r"a.jsonl, line 2: expected an object .* found list"),
        ("a.jsonl", "", r"a.jsonl: the file holds no rows"),
        ("a.json", "", r"a.json: the file holds no rows"),
        ("a.json", "[]", r"a.json: the file holds no rows"),
        ("a.jsonl", '{"text": "a",\n', r"line 1: .* at column 14, where the line ends: '{\"text\": \"a\",'$"),
        ("a.jsonl", '{"text": "' + "a" * 99 + '"]\n', r"line 1: .* at column 111: '\.\.\.a{39}\"\]'$"),
        ("a.json", '[{"text": "a"},\n {"text": }]', r"a.json, line 2: not valid JSON: .* column 11: ' {\"text\": }\]'"),
        ("a.json", '{"data": [], "n": 1}', r"a.json: expected a list of rows, found dict with keys data, n"),
        ("a.json", '[{"text": "a"}, 3]', r"a.json, item 2: expected an object"),
        ("a.csv", "prompt,completion\na,b\nc\n", r"a.csv, row 2 \(line 3\): 1 cells under 2 columns"),
        ("a.csv", "prompt,completion\n", r"a.csv: the file holds no rows"),
        ("a.csv", 'prompt,completion\na,"b"c\n', r"a.csv, line 2: not valid CSV"),
        ("a.parquet", "not parquet", r"a.parquet: not a readable Parquet file"),
        ("a.txt", "hello", r"a.txt: unknown kind of file '.txt'; expected one of .json"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    """The error says which file, which line and what is wrong."""
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        rows(str(tmp_path / name))


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    """A Latin-1 file is told to become UTF-8."""
    (tmp_path / "a.jsonl").write_bytes('{"text": "caf\u00e9"}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"a.jsonl: not UTF-8"):
        rows(str(tmp_path / "a.jsonl"))


def test_what_is_missing_is_said_at_once(tmp_path: Path) -> None:
    """All missing sources stand in one error, with what is there instead."""
    write(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "empty").mkdir()
    sources = [f"{tmp_path}/trian.jsonl", f"{tmp_path}/*.csv", f"{tmp_path}/empty"]
    with pytest.raises(UserError) as error:
        rows(sources)
    lines = str(error.value).splitlines()
    assert len(lines) == 3 and "holds train.jsonl" in lines[0]
    assert "no file matches" in lines[1] and "no data file" in lines[2]
    with pytest.raises(UserError, match="list of sources is empty"):
        rows([])


def test_a_hub_id_needs_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, the error holds the pip line and says that nothing of that name is on disk."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"owner/name:test: no such file or directory.*pip install datasets"):
        rows("owner/name:test")


def test_a_hub_id_with_split_and_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """`id`, `id:split` and `id:config:split` reach the package as they are meant; its errors name the id."""
    calls = []

    class Fake:
        @staticmethod
        def load_dataset(repo: str, config: str | None, split: str) -> list[dict[str, str]]:
            if split == "nope":
                raise ValueError("Unknown split")
            calls.append((repo, config, split))
            return [{"text": "a"}]

    monkeypatch.setitem(sys.modules, "datasets", Fake)
    records = list(read(["owner/name", "owner/name:test", "owner/name:en:train[:10%]"]))
    plain = [("owner/name", None, "train"), ("owner/name", None, "test")]
    assert calls == [*plain, ("owner/name", "en", "train[:10%]")]
    assert records[1].where == "owner/name:test, row 1"
    with pytest.raises(UserError, match="owner/name:nope: cannot load"):
        rows("owner/name:nope")


TABLES = st.lists(st.fixed_dictionaries({"prompt": st.text(), "completion": st.text()}), min_size=1, max_size=4)


@given(table=TABLES, suffix=st.sampled_from([".json", ".jsonl", ".parquet"]))
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, table: list, suffix: str) -> None:
    """Whatever the cells hold, they come back."""
    path = write(tmp_path_factory.getbasetemp() / f"any{suffix}", table)
    assert rows(str(path)) == table
