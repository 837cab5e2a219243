"""What a model can take: positions and ids are checked before the run, by the file and line that break them."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, GPT2Config, JambaConfig, LlamaConfig, OPTConfig, PretrainedConfig

from keyhole.data.capacity import check_max_length, context_length, embedding_rows, has_table
from keyhole.data.run import load_data, preview_data
from keyhole.errors import UserError
from tests.conftest import build_tokenizer
from tests.data.test_run import settings

GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 30}
OPT = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def directory(path: Path, made: PretrainedConfig) -> Path:
    """Config and tokenizer of a model; the data need no more."""
    made.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def texts(path: Path, *lengths: int) -> Path:
    """Samples of so many tokens: one a byte, and eos."""
    path.write_text("".join(json.dumps({"text": "x" * (n - 1)}) + "\n" for n in lengths))
    return path


@pytest.mark.parametrize(
    ("made", "length", "table"),
    [
        (GPT2Config(**GPT2), 30, True),
        (OPTConfig(**OPT, max_position_embeddings=30), 30, True),
        (LlamaConfig(max_position_embeddings=30), 30, False),
        (JambaConfig(num_hidden_layers=2, hidden_size=16, max_position_embeddings=30), 30, False),
    ],
    ids=["gpt2", "opt", "llama", "jamba"],
)
def test_a_table_of_positions_is_told_from_computed_ones(made: PretrainedConfig, length: int, table: bool) -> None:
    assert context_length(made) == length and has_table(made) == table
    assert embedding_rows(made) == made.vocab_size
    check_max_length(None, made)
    check_max_length(length, made)
    if table:
        with pytest.raises(UserError, match="max_length: 31 is more than the 30 positions the model has"):
            check_max_length(31, made)
    else:
        check_max_length(31, made)


@pytest.mark.parametrize("limit", [None, 64])
def test_a_sample_past_the_last_position_is_refused(tmp_path: Path, limit: int | None) -> None:
    model = directory(tmp_path / "model", GPT2Config(**GPT2, vocab_size=300))
    good, bad = texts(tmp_path / "good.jsonl", 30, 5), texts(tmp_path / "bad.jsonl", 8, 31)
    load_data(settings(model, good, max_length=limit))
    for call in (load_data, preview_data):
        with pytest.raises(UserError, match=r"max_length: .*30 positions.*bad.jsonl, line 2 has 31.*max_length=30"):
            call(settings(model, bad, max_length=limit))
    with pytest.raises(UserError, match=r"bad.jsonl, line 2"):
        load_data(settings(model, good, eval_data=str(bad), max_length=limit))
    load_data(settings(model, bad, max_length=30))


def test_padding_stays_within_the_positions(tmp_path: Path) -> None:
    model = directory(tmp_path / "model", GPT2Config(**GPT2, vocab_size=300))
    data = load_data(settings(model, file := texts(tmp_path / "a.jsonl", 30, 5), eval_data=str(file)))
    network = AutoModelForCausalLM.from_config(GPT2Config(**GPT2, vocab_size=300))
    for batch in [*next(data.train), *data.eval]:
        assert batch["input_ids"].shape[1] == 30
        assert network(**batch).loss.isfinite()
    with pytest.raises(UserError, match="packed rows have up to 40 tokens"):
        load_data(settings(model, texts(tmp_path / "b.jsonl", 20, 20, 9), packing=True, max_length=40))


def test_a_rotary_model_warns_once(tmp_path: Path) -> None:
    model = directory(tmp_path / "model", LlamaConfig(max_position_embeddings=30, vocab_size=300))
    small = {"batch_size": 1, "gradient_accumulation_steps": 1}
    report = load_data(settings(model, texts(tmp_path / "a.jsonl", 40, 50), **small)).report
    (warning,) = [line for line in report if "warning" in line]
    assert "50 tokens" in warning and "made for 30" in warning
    assert "warning" not in str(load_data(settings(model, texts(tmp_path / "b.jsonl", 30), **small)).report)


@pytest.mark.parametrize(("rows", "fits"), [(300, True), (258, True), (257, False), (200, False)])
def test_ids_without_a_row_are_refused(tmp_path: Path, rows: int, fits: bool) -> None:
    model = directory(tmp_path / "model", LlamaConfig(vocab_size=rows, pad_token_id=0, bos_token_id=0, eos_token_id=0))
    given = settings(model, texts(tmp_path / "a.jsonl", 8, 5))
    if fits:
        batch = next(load_data(given).train)[0]
        assert int(batch["input_ids"].max()) == 257
    else:
        with pytest.raises(UserError, match=rf"a.jsonl, line 1 has token id 257, .* {rows} rows .*resize") as error:
            load_data(given)
        assert str(model) in str(error.value)


def test_padding_is_an_id_the_model_has(tmp_path: Path) -> None:
    """A tokenizer that was given a padding token of its own does not break a model that was not resized."""
    model = directory(tmp_path / "model", LlamaConfig(vocab_size=261))
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<new-pad>"})
    assert tokenizer.pad_token_id == 261
    tokenizer.save_pretrained(model)
    batch = next(load_data(settings(model, texts(tmp_path / "a.jsonl", 8, 5))).train)[0]
    assert int(batch["input_ids"].max()) == 257
