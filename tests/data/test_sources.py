"""Every kind of file gives the same rows, and a broken one is named with its line."""

import csv
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.data.opened import TABLES
from keyhole.data.prepare import prepare
from keyhole.data.sources import read, remarks, resolve
from keyhole.errors import UserError
from tests.data.chats import tokenizer

WIDE = ", ".join(f'"k{i}": 1' for i in range(60_000))
ROWS = [{"prompt": 'a, "b"\nc', "completion": "\u00e9"}, {"prompt": "x\ty", "completion": "line one\nline two"}]


def write(path: Path, rows: list[dict[str, Any]], **how: Any) -> Path:
    """The rows in the kind of file that the suffix says."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **how)
    elif path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(source: str | list[str]) -> list[dict[str, Any]]:
    return [record.row for record in read(source)]


@pytest.mark.parametrize("suffix", TABLES)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"data{suffix}", ROWS)
    records = list(read(str(path)))
    assert [record.row for record in records] == ROWS
    assert [record.number for record in records] == [1, 2]
    assert records[1].where.startswith(f"{path}, ")
    if suffix != ".parquet":
        packed = tmp_path / "sub" / f"data{suffix}.gz"
        packed.parent.mkdir()
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert rows(str(packed)) == rows(str(packed.parent)) == ROWS
        packed.write_bytes(packed.read_bytes()[:-12])
        with pytest.raises(UserError, match=r"data.*gz: cannot be (unpacked|read)"):
            rows(str(packed))


def test_globs_directories_and_lists(tmp_path: Path) -> None:
    for i in (2, 0, 1):
        write(tmp_path / f"part{i}.jsonl", [{"text": str(i)}])
    (tmp_path / "notes.md").write_text("no data")
    expected = [{"text": "0"}, {"text": "1"}, {"text": "2"}]
    assert rows(str(tmp_path)) == rows(f"{tmp_path}/part*.jsonl") == expected
    assert rows([f"{tmp_path}/part2.jsonl", f"{tmp_path}/part0.jsonl"]) == [expected[2], expected[0]]


def test_json_that_is_jsonl_after_all(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "a"}\n\n{"text": "b"}\n')
    assert [(r.row["text"], r.where) for r in read(str(path))] == [("a", f"{path}, line 1"), ("b", f"{path}, line 3")]


def test_a_comma_decides_for_commas(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion;x\na,b\n")
    assert rows(str(tmp_path / "a.csv")) == [{"prompt": "a", "completion;x": "b"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": b}\n', r"a.jsonl, line 2: not valid JSON: .* at column 10"),
        ("a.jsonl", '{"text": "a"}\n["b"]\n', r"a.jsonl, line 2: expected an object .* found list"),
        ("a.jsonl", '{"text": "a"}\n{"text": "a", "n": {"b": 1, "b": 2}}\n', r'line 2: the key "b" stands twice'),
        ("a.json", '[{"text": "a", "text": "b"}]', r'a.json: the key "text" stands twice in one object'),
        ("a.jsonl", f'{{{WIDE}, "b": 1, "b": 2}}', r'line 1: the key "b" stands twice'),  # and soon: it took a minute
        ("a.jsonl", "", r"a.jsonl: the file holds no rows"),
        ("a.json", "", r"a.json: the file holds no rows"),
        ("a.json", "[]", r"a.json: the file holds no rows"),
        ("a.jsonl", '{"text": "a",\n', r"line 1: .* at column 14, near '{\"text\": \"a\",'$"),
        ("a.jsonl", '{"text": "' + "a" * 99 + '"]\n', r"line 1: .* at column 111, near 'a{39}\"\]'$"),
        ("a.json", '[{"text": "a"},\n {"text": }]', r"a.json, line 2: not valid JSON: .* column 11, near ' {"),
        ("a.json", '{"data": [], "n": 1}', r"a.json: expected a list of rows, found dict with keys data, n"),
        ("a.json", '[{"text": "a"}, 3]', r"a.json, item 2: expected an object"),
        ("a.csv", "prompt,completion\na,b\nc\n", r"a.csv, row 2 \(line 3\): 1 cells under 2 columns"),
        ("a.csv", "prompt,completion\n", r"a.csv: the file holds no rows"),
        ("a.csv", 'prompt,completion\na,"b"c\n', r"a.csv, line 2: not valid CSV"),
        ("a.parquet", "not parquet", r"a.parquet: not a readable Parquet file"),
        ("a.txt", " \n\n", r"a.txt: the file holds no rows"),
        ("a.txt", "a\nb\0c", r"a.txt, line 2: a NUL character"),
        ("a.doc", "hello", r"a.doc: unknown kind of file '.doc'; expected one of .json.*, .txt"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        rows(str(tmp_path / name))


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    rest = '{"text": "a"}\n' * 3000
    (tmp_path / "a.jsonl").write_bytes((rest + '{"text": "caf\u00e9"}').encode("latin-1"))
    with pytest.raises(UserError, match=r"a.jsonl, line 3001: not UTF-8"):
        rows(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.csv").write_bytes("text\nab\ncaf\u00e9\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"a.csv, line 3: not UTF-8"):
        rows(str(tmp_path / "a.csv"))
    (tmp_path / "b.jsonl").write_bytes(rest.encode("utf-16"))
    with pytest.raises(UserError, match=r"b.jsonl \(it looks like UTF-16\): not UTF-8"):
        rows(str(tmp_path / "b.jsonl"))


def saved(folder: Path, table: list[dict[str, Any]]) -> Path:
    """A data set as `save_to_disk` of `datasets` writes it; its only file."""
    import pyarrow

    path, content = folder / "data-00000-of-00001.arrow", pyarrow.Table.from_pylist(table)
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": path.name}], "_format_columns": None}))
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, content.schema) as stream:
        stream.write_table(content, max_chunksize=10)
    return path


def test_a_directory_of_save_to_disk_is_read(tmp_path: Path) -> None:
    """Its split train, the columns that are shown, all files; a file that ends early, in a whole batch too, is not."""
    table = [{"text": f"t{i}", "other": i} for i in range(5)]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    path = saved(tmp_path / "train", table)
    state = json.loads((path.parent / "state.json").read_text())
    assert rows(str(tmp_path)) == table
    shown = {"_format_columns": ["text"], "_data_files": state["_data_files"] * 2}
    (path.parent / "state.json").write_text(json.dumps(state | shown))
    assert rows(str(tmp_path)) == [{"text": row["text"]} for row in table] * 2
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"not a readable Arrow file \(after row 5\): .*it has no end"):
        rows(str(tmp_path))
    for wrong in ({"_data_files": 1}, {}, {"_data_files": [], "_indices_data_files": [1]}):
        (path.parent / "state.json").write_text(json.dumps(wrong))
        with pytest.raises(UserError, match="train: (state.json does not say|an old version)"):
            rows(str(tmp_path))


def test_nulls_that_parquet_added_are_taken_out(tmp_path: Path) -> None:
    """A key that only another row has is no key of this one; a null column stays one."""
    table = [{"turn": {"calls": [{"a": 1}], "b": "x"}, "n": 1}, {"turn": {"calls": [{"c": 2}]}, "n": None}]
    assert rows(str(write(tmp_path / "a.parquet", table))) == table


def test_a_row_of_20_megabytes_is_refused(tmp_path: Path) -> None:
    large = "x" * (20 * 2**20)
    for suffix in (".jsonl", ".csv"):
        path = write(tmp_path / f"a{suffix}", [{"text": "a"}, {"text": large}])
        with pytest.raises(UserError, match=r"a\.\w+, (line|row) [23]: .*(longer than|field larger)"):
            rows(str(path))
    for suffix in (".json", ".parquet"):
        path = write(tmp_path / f"a{suffix}", [{"text": large}])
        with pytest.raises(UserError, match="(item|row) 1: 20,971,520 characters; a row has at most"):
            prepare(str(path), tokenizer())


def test_what_is_missing_is_said_at_once(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "empty").mkdir()
    sources = [f"{tmp_path}/trian.jsonl", f"{tmp_path}/*.csv", f"{tmp_path}/empty"]
    with pytest.raises(UserError) as error:
        rows(sources)
    lines = str(error.value).splitlines()
    assert len(lines) == 3 and "holds train.jsonl" in lines[0]
    assert "no file matches" in lines[1] and "no data file" in lines[2]


def test_a_hub_id_with_split_and_config(monkeypatch: pytest.MonkeyPatch) -> None:
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
    path = write(tmp_path_factory.getbasetemp() / f"any{suffix}", table)
    assert rows(str(path)) == table


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """A row has one value per name: the second column would replace the first."""
    import pyarrow
    import pyarrow.parquet as parquet

    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, names=["prompt", "text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="two columns are called text"):
        rows(str(tmp_path / "a.parquet"))


def test_a_map_in_parquet_is_an_object(tmp_path: Path) -> None:
    """Not a list of pairs, which a template would write as such; one with a key twice is refused."""
    import pyarrow
    import pyarrow.parquet as parquet

    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    for pairs in ([("k", 1)], [("k", 1), ("k", 2)]):
        table = pyarrow.table({"text": ["a"], "m": pyarrow.array([pairs], kind)})
        parquet.write_table(table, tmp_path / f"{len(pairs)}.parquet")
    assert rows(str(tmp_path / "1.parquet")) == [{"text": "a", "m": {"k": 1}}]
    with pytest.raises(UserError, match="2.parquet: .*a map has the same key twice"):
        rows(str(tmp_path / "2.parquet"))


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
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(UserError, match=r"holds no data file .*; it holds README.md, b.jsonl.zst, more/"):
        resolve([str(tmp_path)])


def test_a_file_that_is_read_twice_is_named(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.jsonl")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "a.jsonl")
    (line,) = told(f"{tmp_path}/b.jsonl", f"{tmp_path}/*.jsonl")
    assert "a.jsonl (2 times)" in line and "b.jsonl (2 times)" in line


def test_a_directory_with_several_splits_is_named(tmp_path: Path) -> None:
    """Training on the test set is reported; the line is part of the report of the data."""
    make(tmp_path, "train-0.jsonl", "sst2.test.jsonl", "contest.jsonl")
    (line,) = told(str(tmp_path))
    assert "files of test, train are all read" in line
    report = prepare(str(tmp_path), tokenizer()).report.lines()
    assert f"warning: {line}" in report
    assert told(f"{tmp_path}/*train*") == []
