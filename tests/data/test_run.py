"""The data of a run out of its settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from keyhole.data import DataSettings, load_data, load_tokenizer, preview_data
from keyhole.errors import UserError


def settings(model: Path, data: Path, **changes: Any) -> DataSettings:
    given = {"model": str(model), "train_data": str(data), "batch_size": 4, "gradient_accumulation_steps": 2}
    return DataSettings(**given | {"max_length": 64} | changes)


def test_loaders_and_report(tiny_model: Path, tiny_data: Path) -> None:
    """Steps of the right size, evaluation in order, a report that names both sets."""
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


def test_preview_of_the_data(tiny_model: Path, tiny_data: Path) -> None:
    """The report first, then as many samples as asked for."""
    text = preview_data(settings(tiny_model, tiny_data), 2)
    assert text.startswith(f"{tiny_data}: format prompt_completion")
    assert text.count("sample ") == 2 + text.count("longest sample")


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path, tiny_data: Path) -> None:
    """The key and the directory stand in the error, and whether it is a model at all."""
    with pytest.raises(UserError, match=f"model: {tmp_path} has no config.json"):
        load_data(settings(tmp_path, tiny_data))
    for family in ("llama", "opt"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        with pytest.raises(UserError, match=f"model: {tmp_path} has no tokenizer; copy its tokenizer files in$"):
            load_data(settings(tmp_path, tiny_data))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=f"model: the tokenizer of {tmp_path} cannot be read: .") as error:
        load_data(settings(tmp_path, tiny_data))
    assert "\n" not in str(error.value)
