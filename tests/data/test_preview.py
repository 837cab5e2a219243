"""The preview shows every token once, and which are trained, without colour."""

import json
from pathlib import Path

from keyhole.data.prepare import prepare
from keyhole.data.preview import GREEN, marked, preview
from tests.data import chats
from tests.data.chats import chat, tokenizer


def write(tmp_path: Path, *rows: dict) -> str:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "a.jsonl")


def test_runs_are_named_and_tokens_written_out(tmp_path: Path) -> None:
    tok = tokenizer(chats.CHATML)
    path = write(tmp_path, {"messages": chat("Hello", "yes")}, {"messages": chat("Hello", "no")})
    lines = preview(prepare(path, tok), tok, 1).splitlines()
    assert lines[0].startswith(f"sample 1 of 2 ({path}, line 1): ") and lines[0].endswith(", 3 trained")
    assert lines[1].startswith("  read         0  <|im_start|>|") and "<|im_end|>|\\n|" in lines[1]
    assert lines[3].split()[0] == "TRAINED" and lines[3].endswith("s|<|im_end|>")
    ids = prepare(path, tok)[0].input_ids
    shown = [int(i) for line in lines if line.startswith("  ids") for i in line.split()[1:]]
    assert shown == ids
    assert "sample 2" not in "\n".join(lines)


def test_what_is_cut_is_shown(tmp_path: Path) -> None:
    tok = tokenizer()
    dataset = prepare(write(tmp_path, {"text": "Z" * 230}), tok, max_length=210)
    text = preview(dataset, tok)
    assert "210 tokens, 209 trained, 21 more cut at the end (21 trained)" in text
    assert "... 129 more ..." in text
    dataset = prepare(write(tmp_path, {"prompt": "Q" * 200, "completion": "Z" * 30}), tok, max_length=210)
    text = preview(dataset, tok)
    assert ", 21 cut at the beginning of the prompt" in text and "... 99 more ..." in text


def test_file_names_cannot_drive_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J.jsonl"
    path.write_text('{"text": "Hello \\u001b[2J"}')
    dataset = prepare(str(path), tokenizer())
    text = "\n".join([*dataset.report.lines(), preview(dataset, tokenizer())])
    assert "\x1b" not in text and text.count(r"a\x1b[2J.jsonl") == 2


def test_packed_rows_show_their_samples(tmp_path: Path) -> None:
    tok = tokenizer()
    rows = [{"prompt": "Q", "completion": "Z" * n} for n in (3, 4)]
    dataset = prepare(write(tmp_path, *rows), tok, max_length=32, packing=True)
    assert any(line.startswith("packed into 1 row of 32 tokens") for line in dataset.report.lines())
    text = preview(dataset, tok)
    assert text.startswith("row 1 of 1: 11 tokens in 2 samples\nsample 2 of 2")
    assert text.count("TRAINED") == 2


def test_a_page_shows_the_first_rows_and_marks_what_is_trained(tmp_path: Path) -> None:
    """The tokens of the preview, of at most three rows, and of long runs both ends; colour marks the same tokens."""
    tok = tokenizer(chats.CHATML)
    rows = [{"messages": chat("Q" * n, "yes")} for n in (2, 500)]
    dataset = prepare(write(tmp_path, *rows), tok)
    (where, told, words), (_, _, longer) = [(one.where, one.about, one.runs) for one in marked(dataset, tok)]
    assert where.endswith("a.jsonl, line 1") and told.endswith("tokens, 3 trained")
    assert [is_trained for is_trained, _ in words] == [False, True, False]
    assert "".join(text for _, texts in words for text in texts) == tok.decode(dataset[0].input_ids)
    assert f" … {dataset.lengths[1] - 4 - 240:,} more … " in longer[0][1]
    assert len(marked(prepare(write(tmp_path, *rows * 3), tok), tok)) == 3
    assert [line for line in preview(dataset, tok, color=True).splitlines() if GREEN in line][0].count("TRAINED") == 1
