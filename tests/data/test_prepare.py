"""From a file to a data set: cut, dropped, packed, and all of it counted."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keyhole.data.collect import Collector
from keyhole.data.examples import Example
from keyhole.data.opened import Record
from keyhole.data.prepare import prepare
from keyhole.data.settings import DataSettings
from keyhole.data.tokens import Tokens
from keyhole.errors import UserError
from tests.data import chats
from tests.data.chats import answers, chat, tokenizer


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    """Completions of 1 to 8 tokens (a space and a letter are a token each) after prompts of 2."""
    return write(tmp_path / "pairs.jsonl", [{"prompt": "QX", "completion": "Z" * n} for n in range(1, 9)])


def test_the_report_says_what_was_found(pairs: str) -> None:
    dataset = prepare(pairs, tokenizer(chats.CHATML))
    r = dataset.report
    assert (r.read, r.samples, r.tokens, r.trained_tokens) == (8, 8, 8 * 3 + 36, 8 + 36)
    assert dataset.end_token_ids == [tokenizer().eos_token_id]
    lines = r.lines()
    assert lines[0] == f"{pairs}: format prompt_completion (found column prompt, completion)"
    assert lines[1] == "template: none; text is used as it stands, with </s> at the end"
    assert lines[2].startswith("8 samples of 8 rows read, 60 tokens (longest sample 11), 44 trained on (73.3%")
    assert len(lines) == 3


def test_truncation_counts_what_is_lost(pairs: str) -> None:
    dataset = prepare(pairs, tokenizer(), max_length=6)
    r = dataset.report  # lengths 4..11 become 4, 5, 6, 6, ...; the tails hold 1 + 2 + 3 + 4 + 5
    assert (r.truncated, r.cut_trained_tokens, r.trained_tokens) == (5, 15, 29)
    assert max(dataset.lengths) == 6 and r.lines()[-1].endswith("5 samples, 34.1% of the trained tokens cut (15)")
    assert dataset.cuts[7].tokens == 5 and 2 not in dataset.cuts


def test_overlong_samples_can_be_dropped_or_refused(pairs: str) -> None:
    dataset = prepare(pairs, tokenizer(), max_length=6, overlong="drop")
    assert (dataset.report.dropped_overlong, len(dataset)) == (5, 3)
    with pytest.raises(UserError, match=r"pairs.jsonl, line 4: 7 tokens, more than max_length=6; raise max_length"):
        prepare(pairs, tokenizer(), max_length=6, overlong="error")


def test_samples_with_nothing_to_train_on_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [{"messages": m} for m in (chat("Hello", "yes"), chat("Hello"), [])]
    dataset = prepare(write(tmp_path / "a.jsonl", rows), tokenizer(chats.CHATML), max_length=60)
    assert (dataset.report.dropped_untrained, dataset.report.samples) == (2, 1)
    assert answers(tokenizer(), dataset[0]) == ["yes<|im_end|>"]
    assert dataset.report.lines()[-1] == "warning: dropped: 2 samples with nothing to train on"


@pytest.mark.parametrize("bos", [False, True])
def test_a_long_prompt_is_cut_from_the_left_so_that_the_answer_survives(tmp_path: Path, bos: bool) -> None:
    tok = tokenizer(chats.CHATML, bos)
    rows = [{"prompt": "A" * 40 + "B" * 10, "completion": "yes"}]
    dataset = prepare(write(tmp_path / "a.jsonl", rows), tok, max_length=20)
    assert answers(tok, dataset[0]) == ["yes</s>"] and dataset.report.cut_trained_tokens == 0
    text = tok.decode(dataset[0].input_ids)
    assert len(dataset[0].input_ids) == 20 and text.endswith("A" + "B" * 10 + "yes</s>")
    assert text.startswith("<s>A" if bos else "A")
    assert "1 sample, 0.0% of the trained tokens cut" in dataset.report.lines()[-1]
    talk = prepare(write(tmp_path / "b.jsonl", [{"messages": chat("Q" * 90, "yes")}]), tok, max_length=60)
    assert answers(tok, talk[0]) == ["yes<|im_end|>"] and len(talk[0].input_ids) == 60


def test_a_long_answer_leaves_the_prompt_half_of_the_row(tmp_path: Path) -> None:
    tok = tokenizer()
    path = write(tmp_path / "a.jsonl", [{"prompt": "A" * 40, "completion": "Z" * 40}])
    dataset = prepare(path, tok, max_length=20)
    assert tok.decode(dataset[0].input_ids) == "A" * 10 + "Z" * 10
    assert (dataset.cuts[0].before, dataset.cuts[0].tokens, dataset.cuts[0].trained) == (30, 31, 31)


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}] * 3)
    with pytest.raises(UserError, match=r"no sample is left(.|\n)*3 have no trained token.*roles found: user"):
        prepare(path, tokenizer(chats.CHATML))
    path = write(tmp_path / "b.jsonl", [{"text": "Q" * 50}] * 2)
    with pytest.raises(UserError, match=r"no sample is left(.|\n)*2 are longer than max_length=8"):
        prepare(path, tokenizer(), max_length=8, overlong="drop")


def test_every_file_has_its_own_format(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "Hello there"}])
    write(tmp_path / "b.jsonl", [{"messages": chat("Hi", "yes"), "text": "no"}])
    dataset = prepare([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], tokenizer(chats.CHATML))
    assert [why.split()[1] for why in dataset.report.formats.values()] == ["text", "messages"]
    dataset = prepare(str(tmp_path), tokenizer(chats.CHATML), data_format="text")
    assert all("data_format is set" in why for why in dataset.report.formats.values())
    with pytest.raises(UserError, match=r"a.jsonl, line 1: column messages is missing"):
        prepare(str(tmp_path), tokenizer(), data_format="messages")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overlong": "cut"}, r"overlong='cut': expected truncate \| split"),
        ({"train_on": "prompts"}, r"train_on='prompts': expected answers \| all"),
        ({"data_format": "x"}, "data_format='x'"),
        ({"packing": True, "max_length": None}, "packing=true needs max_length"),
        ({"max_length": 1}, "max_length=1: expected"),
        ({"template_date": "today"}, "template_date='today': expected a date"),
    ],
)
def test_settings_are_checked_first(pairs: str, change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(pairs, tokenizer(), **change)


def test_a_row_of_another_layout_than_the_first_is_refused(tmp_path: Path) -> None:
    """It has a chat, and would be read as the plain text that the first row has."""
    both = {"text": "b", "messages": chat("Hi", "A.")}
    source = write(tmp_path / "a.jsonl", [{"text": "a b"}, both])
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: .* data format messages.*data_format=text"):
        prepare(source, tokenizer(chats.CHATML))
    assert prepare(source, tokenizer(chats.CHATML), data_format="text").report.samples == 2


def test_text_that_the_tokenizer_does_not_know_is_reported(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "</s>"], vocab_size=40, show_progress=False)
    made.train_from_iterator(["hello world"], trainer)
    tok = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    report = prepare(write(tmp_path / "a.jsonl", [{"text": "hello \u732b world \u732b"}]), tok).report
    assert any(line.startswith("warning: 2 tokens (") for line in report.lines()) and report.unknown == 2


def test_control_tokens_of_another_model_are_named(tmp_path: Path) -> None:
    other = "{% for m in messages %}{{ '<|begin|>' + m.role + '<|im_end|>' + m.content + '<|fin|>' }}{% endfor %}"
    chats_of = write(tmp_path / "chats.jsonl", [{"messages": chat("Hi", "A.")}] * 2)
    assert prepare(chats_of, tokenizer(chats.CHATML)).report.foreign == {}
    report = prepare(chats_of, tokenizer(chats.CHATML), chat_template=other).report
    assert report.foreign == {"<|begin|>": 2, "<|fin|>": 2}
    assert any(line.startswith("warning: ") and "<|fin|> (2 texts)" in line for line in report.lines())
    texts = write(tmp_path / "texts.jsonl", [{"text": "<|im_start|>user a <| b |> <|eot|>"}])
    assert prepare(texts, tokenizer()).report.foreign == {"<|eot|>": 1}


def test_columns_that_are_not_used_are_named(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b", "system": "Be kind.", "context": "text"}
    path = write(tmp_path / "a.jsonl", [row, row | {"context": ""}])
    lines = prepare(path, tokenizer()).report.lines()
    assert "columns that are not used: context (1 row)" in lines
    assert [line for line in lines if "warning" in line and "system (2 rows)" in line]
    chosen = prepare(path, tokenizer(), prompt="{prompt} {system}").report
    assert not chosen.unread


def test_a_system_column_begins_every_chat(tmp_path: Path) -> None:
    said, system = chat("Hi", "A."), {"role": "system", "content": "Be good."}
    tok = tokenizer(chats.CHATML)
    own = prepare(write(tmp_path / "own.jsonl", [{"messages": [system, *said]}]), tok)
    for row in ({"messages": said}, {"messages": [system, *said]}, {"prompt": said[:1], "completion": said[1:]}):
        column = prepare(write(tmp_path / "column.jsonl", [{"system": "Be good.", **row}]), tok)
        assert column.ids.tolist() == own.ids.tolist()
    with pytest.raises(UserError, match="column system differs"):
        prepare(write(tmp_path / "two.jsonl", [{"system": "Be bad.", "messages": [system, *said]}]), tok)


def test_a_path_is_a_source_and_every_source_has_a_weight(pairs: str) -> None:
    whole = prepare(pairs, tokenizer()).fingerprint
    assert prepare(Path(pairs), tokenizer(), train_weights=[1]).fingerprint == whole
    for weights, says in (([1, 2], "2 numbers for 1 sources"), ([-1], "expected"), ([float("nan")], "expected")):
        with pytest.raises(UserError, match=says):
            prepare(Path(pairs), tokenizer(), train_weights=weights)
    with pytest.raises(UserError, match="train_weights: 8,000,000,000 rows per epoch of 8 samples"):
        prepare([pairs], tokenizer(), train_weights=[1e9])
    assert len(prepare([pairs], tokenizer(), train_weights=[1000])) == 8000


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_that_belong_to_the_rows_cannot_be_set(pairs: str, name: str) -> None:
    """add_generation_prompt: true would end every trained chat with the beginning of another answer."""
    with pytest.raises(UserError, match=f"chat_template_kwargs: {name} comes from the data"):
        prepare(pairs, tokenizer(), chat_template_kwargs={name: True})


def test_settings_about_chats_are_named_where_they_do_nothing(pairs: str, tmp_path: Path) -> None:
    """A chat template beside rows that are no chats; a variable that the template never reads, and documents that it
    does not write."""
    how = {"chat_template": chats.CHATML, "chat_template_kwargs": {"thinkng": False}}
    unused = "warning: chat_template and chat_template_kwargs: no effect, because no row is a chat"
    assert prepare(pairs, tokenizer(), **how).report.lines()[-1] == unused
    talk = write(tmp_path / "chats.jsonl", [{"messages": chat("Hi", "A."), "documents": [{"text": "Long."}]}] * 2)
    assert prepare(talk, tokenizer(), **how).report.lines()[-2:] == [
        "warning: 2 chats have documents that the chat template does not write",
        "warning: 2 chats have variables in chat_template_kwargs that the chat template does not read",
    ]


def test_the_peak_is_little_more_than_what_stays() -> None:
    count, length = 500, 4000
    example = Example(Record("a.jsonl", "line", 1, {}), prompt="", answer="")
    tokens = Tokens(np.arange(length, dtype=np.int32), np.ones(length, dtype=bool), None)
    tracemalloc.start()
    try:
        collector = Collector(DataSettings(max_length=None), [])
        for _ in range(count):
            collector.add(example, tokens)
        data = collector.dataset(0, None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(data.ids) == count * length and peak < 7 * count * length
    assert data[499].labels[1:3] == [1, 2] and data.where[499] == "a.jsonl, line 1"
