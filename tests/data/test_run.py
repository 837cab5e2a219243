"""The data of a run out of its settings."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keyhole import assets
from keyhole.config import TrainConfig
from keyhole.data.run import load_data, load_tokenizer, preview_data
from keyhole.data.settings import DataSettings, data_settings
from keyhole.errors import UserError


def settings(model: Path, data: Path, **changes: Any) -> DataSettings:
    given = {"model": str(model), "train_data": str(data), "batch_size": 4, "gradient_accumulation_steps": 2}
    return DataSettings(**given | {"max_length": 64} | changes)


def test_loaders_and_report(tiny_model: Path, tiny_data: Path) -> None:
    data = load_data(settings(tiny_model, tiny_data, eval_data=[str(tiny_data)]))
    assert data.train.steps_per_epoch == 3
    assert [len(batch["input_ids"]) for batch in next(data.train)] == [4, 4]
    assert len(data.eval) == 6 and data.end_token_ids == [load_tokenizer(str(tiny_model)).eos_token_id]
    assert any(line.startswith("train: 24 samples") for line in data.report)
    assert any(line.startswith("eval:  24 samples") for line in data.report)


def test_only_training_is_packed(tiny_model: Path, tiny_data: Path) -> None:
    """The evaluation loss does not depend on a setting of training."""
    data = load_data(settings(tiny_model, tiny_data, eval_data=str(tiny_data), packing=True))
    assert "position_ids" in next(data.train)[0]
    assert all("attention_mask" in batch for batch in data.eval)
    assert not load_data(settings(tiny_model, tiny_data)).eval


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path, tiny_data: Path) -> None:
    with pytest.raises(UserError, match=f"model: {tmp_path} has no config.json"):
        load_data(settings(tmp_path, tiny_data))
    for family in ("llama", "opt"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        with pytest.raises(UserError, match=f"model: {tmp_path} has no tokenizer; copy its tokenizer files in$"):
            load_data(settings(tmp_path, tiny_data))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=f"model: {tmp_path}/tokenizer.json cannot be read") as error:
        load_data(settings(tmp_path, tiny_data))
    assert "\n" not in str(error.value)


def test_a_tokenizer_with_dropout_makes_the_same_tokens_every_time(tmp_path: Path) -> None:
    """BPE dropout is off while data are prepared, and the report says so."""
    model = tmp_path / "model"
    shutil.copytree(assets.MODEL, model)
    plain = load_data(settings(model, assets.TRAIN, data_cache=None))
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.5
    (model / "tokenizer.json").write_text(json.dumps(content))
    found = load_data(settings(model, assets.TRAIN, data_cache=None))
    told = "tokenizer: its BPE dropout of 0.5 is off: a text has the same tokens in every run"
    assert found.train.dataset.fingerprint == plain.train.dataset.fingerprint and found.report == [told, *plain.report]


def test_a_batch_larger_than_the_data_is_mentioned(tiny_model: Path, tiny_data: Path) -> None:
    report = load_data(settings(tiny_model, tiny_data, batch_size=20)).report
    assert "batch_size=20 x gradient_accumulation_steps=2 is more than the 24 rows" in "\n".join(report)
    assert not any("batch_size" in line for line in load_data(settings(tiny_model, tiny_data)).report)


def test_a_preview_reads_only_the_samples_it_shows(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "Hello"}) + "\n" + (json.dumps({"text": "x" * 9}) + "\n") * 2 + "{broken\n" * 9)
    text = preview_data(settings(tiny_model, path), 2)
    assert text.count("sample ") == 2 + 1 and "only the first rows were read" in text
    with pytest.raises(UserError, match="line 4: not valid JSON"):
        load_data(settings(tiny_model, path))
    with pytest.raises(UserError, match="line 4: not valid JSON"):
        preview_data(settings(tiny_model, path), 4)


def test_sources_are_mixed_by_weight(tiny_model: Path, tmp_path: Path) -> None:
    """2 takes every sample twice, 0.5 half of them, 0 none; which half is the same in every run."""
    for name, letter in (("a", "A"), ("b", "B"), ("c", "C")):
        rows = [{"text": letter * (i + 2)} for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [str(tmp_path / f"{name}.jsonl") for name in "abc"]
    given = {"train_data": sources, "train_weights": [2, 0.5, 0]}
    tok = load_tokenizer(str(tiny_model))
    found = [load_data(settings(tiny_model, tmp_path, **given)) for _ in range(2)]
    letters = [tok.decode(row.input_ids)[0] for row in found[0].train.dataset]
    assert letters == ["A"] * 8 + ["B"] * 2
    assert found[0].train.fingerprint == found[1].train.fingerprint
    assert any("8 of source 1 (weight 2), 2 of source 2 (weight 0.5)" in line for line in found[0].report)
    packed = load_data(settings(tiny_model, tmp_path, **given, packing=True)).train.dataset
    assert sorted(i for row in packed.rows for i in row) == sorted(
        i for row in found[0].train.dataset.rows for i in row
    )
    with pytest.raises(UserError, match="train_weights: no sample is left"):
        load_data(settings(tiny_model, tmp_path, train_data=sources, train_weights=[0, 0, 0]))


def test_columns_are_renamed(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "1 + 1 = ", "answer": "2", "text": "no"}) + "\n")
    columns = {"prompt": "question", "completion": "answer"}
    data = load_data(settings(tiny_model, path, columns=columns)).train.dataset
    assert load_tokenizer(str(tiny_model)).decode(data[0].input_ids).startswith("1 + 1 = 2")
    with pytest.raises(
        UserError, match="line 1: columns: the data have no column reply; found: question, answer, text"
    ):
        load_data(settings(tiny_model, path, columns={"completion": "reply"}))


def test_duplicates_are_left_out_of_training_only(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"text": "Hello"}) + "\n") * 3 + json.dumps({"text": "Bye"}) + "\n")
    data = load_data(settings(tiny_model, path, eval_data=str(path), dedup=True))
    assert len(data.train.dataset) == 2 and len(data.eval.dataset) == 4
    assert any("dedup: 2 samples are the same" in line for line in data.report)


DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


def test_the_template_of_a_setting_is_a_text_or_a_regular_file(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(DATED)
    assert settings(tiny_model, tiny_data, chat_template=str(path)).template_text == DATED
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * (2**20 + 1))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    cases = {
        "nothing": "No such file",
        "pipe": "it is not a regular file",
        "large": "it has 1,048,577 bytes",
        "binary": "not UTF-8",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=f"chat_template: .*{name}: {message}"):
            load_data(settings(tiny_model, tiny_data, chat_template=str(tmp_path / name)))
    with pytest.raises(UserError, match="/dev/zero: it is not a regular file"):
        load_data(settings(tiny_model, tiny_data, chat_template="/dev/zero"))


def test_held_out_samples_that_are_trained_on_are_counted(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    lines = tiny_data.read_text().splitlines(keepends=True)
    other = lines[0].replace("1", "9")
    (tmp_path / "held.jsonl").write_text("".join([*lines[:3], other]))
    (tmp_path / "apart.jsonl").write_text(other)
    for packing in (False, True):
        data = load_data(settings(tiny_model, tiny_data, eval_data=str(tmp_path / "held.jsonl"), packing=packing))
        assert any("eval:  warning: 3 of the 4 samples are also in train_data" in line for line in data.report)
    data = load_data(settings(tiny_model, tiny_data, eval_data=str(tmp_path / "apart.jsonl")))
    assert not any("also in train_data" in line for line in data.report)


def test_a_resumed_run_keeps_the_day_the_padding_and_the_order_that_it_began_with() -> None:
    """What the config names is not asked of the checkpoint, and what is no such state is refused."""
    config = TrainConfig(model="m", method="zo", output_dir="o", pad_to_multiple_of="auto", stratify="auto")
    found = data_settings(config)
    assert (found.model, found.template_date, found.padding, found.stratify) == ("m", None, None, "auto")
    found = data_settings(config, {"padding": ["auto", 16, 128], "date": "2024-02-28", "stratified": True})
    assert (found.pad_to_multiple_of, found.padding) == ("auto", (16, 128))
    assert (found.template_date, found.stratify) == ("2024-02-28", True)
    named = replace(config, template_date="2025-01-31", stratify=False)
    found = data_settings(named, {"padding": [8, 8, None], "date": "2024-02-28", "stratified": True})
    assert (found.pad_to_multiple_of, found.padding) == (8, None)
    assert (found.template_date, found.stratify) == ("2025-01-31", False)
    assert data_settings(config, {"padding": ["auto", 16, 128], "stratified": 1}).stratify is False
    with pytest.raises(UserError, match="--resume: what the checkpoint says of its data cannot be used"):
        data_settings(config, {"padding": 3})


def test_questions_of_a_task_are_training_rows() -> None:
    """As many as were asked for, with right answers that are trained; if none fits, that is said."""
    given = {"task": "demo", "num_train": 8, "num_dev": 4, "num_eval": 4, "batch_size": 4, "data_cache": None}
    data = load_data(DataSettings(**given, model="demo", max_length=128))
    assert len(data.train.dataset.lengths) == 8 and len(next(data.train)) == 1
    assert [len(task.questions) for tasks in (data.dev, data.test) for task in tasks] == [4, 4]
    with pytest.raises(UserError, match="^no sample is left to train on"):
        load_data(DataSettings(**given, model="demo", max_length=2, overlong="drop"))
