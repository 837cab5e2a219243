"""Plain text files are documents, and every token of them is trained on once."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.data import readers
from keyhole.data.prepare import prepare
from keyhole.data.sources import read, remarks, resolve
from keyhole.errors import UserError
from tests.data.chats import tokenizer

STORY = "What is the answer: yes or no?\n\nThe capital of France is Paris. " * 9


def trained(dataset: Any) -> list[int]:
    return [label for sample in dataset for label in sample.labels if label != -100]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("max_length", [2, 7, 64, 4096])
def test_every_token_of_a_text_file_is_trained_on_once(
    tmp_path: Path, bos: bool, packing: bool, max_length: int
) -> None:
    (tmp_path / "story.txt").write_text(STORY)
    own = tokenizer(bos=bos)
    dataset = prepare(str(tmp_path / "story.txt"), own, max_length=max_length, packing=packing)
    expected = [*own(STORY, add_special_tokens=False).input_ids, own.eos_token_id]
    found = dataset.ids[dataset.trained].tolist()
    assert found == (expected if bos else expected[1:])
    assert max(dataset.lengths) == min(max_length, len(expected) + bos)
    assert dataset.report.truncated == dataset.report.cut_trained_tokens == 0
    assert all(dataset.ids[start] == own.bos_token_id for start in dataset.starts[:-1]) or not bos
    assert sorted(trained(dataset)) == sorted(found)


@given(st.text("ab \n", max_size=200), st.integers(1, 40))
def test_pieces_joined_are_the_text(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_text(text)
    before, readers.PIECE_CHARACTERS = readers.PIECE_CHARACTERS, size
    try:
        found = list(readers.read_documents(path))
    finally:
        readers.PIECE_CHARACTERS = before
    joined = "".join(record.row["text"] for record in found)
    assert joined.strip() == text.strip()
    assert [record.ends for record in found] == [False] * (len(found) - 1) + [True] * bool(found)
    longest = max(map(len, text.split("\n")))
    assert all(len(record.row["text"].strip()) <= 2 * size + longest for record in found)


def test_a_line_of_endoftext_separates_documents(tmp_path: Path) -> None:
    (tmp_path / "stories.txt").write_text("One.\nTwo.\n<|endoftext|>\n\nThree.\n<|endoftext|>\n<|endoftext|>\n")
    dataset = prepare(str(tmp_path / "stories.txt"), tokenizer())
    assert [record.row["text"] for record in read(str(tmp_path / "stories.txt"))] == ["One.\nTwo.", "Three."]
    assert (dataset.report.read, len(dataset)) == (2, 2)
    assert [sample.input_ids[-1] for sample in dataset] == [tokenizer().eos_token_id] * 2
    assert [dataset.where[i].rpartition(", ")[2] for i in range(2)] == ["sample 1", "sample 2"]


def test_a_directory_of_texts_is_read_and_notes_beside_tables_are_not(tmp_path: Path) -> None:
    texts, tables = tmp_path / "texts", tmp_path / "tables"
    for folder, names in ((texts, ("b.txt", "a.md", "README.md", ".c.txt")), (tables, ("notes.txt", "a.jsonl"))):
        folder.mkdir()
        for name in names:
            (folder / name).write_text('{"text": "yes"}\n' if name.endswith("jsonl") else f"{name}\n")
    (texts / "c.txt.gz").write_bytes(gzip.compress(b"no\n"))
    assert [Path(name).name for name in resolve([str(texts)])] == ["a.md", "b.txt", "c.txt.gz"]
    assert [record.row["text"] for record in read(str(texts))] == ["a.md", "b.txt", "no"]
    assert remarks([str(texts)], resolve([str(texts)])) == []
    assert [Path(name).name for name in resolve([str(tables)])] == ["a.jsonl"]
    (line,) = remarks([str(tables)], [])
    assert "not read: notes.txt" in line and "plain texts only where no tables are" in line


def test_long_rows_of_text_can_be_split_too(tmp_path: Path) -> None:
    """overlong=split for the column `text`; a question is never parted from its answer."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in (STORY, "yes")))
    own = tokenizer()
    dataset = prepare(str(path), own, max_length=16, overlong="split")
    ids = [[*own(text, add_special_tokens=False).input_ids, own.eos_token_id] for text in (STORY, "yes")]
    assert dataset.ids[dataset.trained].tolist() == ids[0][1:] + ids[1][1:]
    assert "split into samples: 1 text longer than max_length=16" in dataset.report.lines()
    path.write_text(json.dumps({"prompt": "What", "completion": STORY}))
    with pytest.raises(UserError, match=r"line 1: longer than max_length=16, and overlong=split is for plain text"):
        prepare(str(path), own, max_length=16, overlong="split")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": None}, "cut into samples of max_length tokens, and it is null"),
        ({"completion": "{text}"}, "column prompt is missing for data format prompt_completion; found: text"),
        ({"columns": {"text": "line"}}, "the data have no column line; found: text"),
        ({"data_format": "messages"}, "column messages is missing for data format messages; found: text"),
        ({"max_length": 8, "overlong": "error"}, "more than max_length=8; raise max_length, or set overlong"),
    ],
)
def test_settings_that_do_not_fit_plain_text_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "story.txt").write_text(STORY)
    with pytest.raises(UserError, match=rf"story\.txt.*: .*{message}"):
        prepare(str(tmp_path / "story.txt"), tokenizer(), **settings)
