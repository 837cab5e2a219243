"""A GGUF file and a config.json that contradict each other: refused, with both values."""

import json
from pathlib import Path
from typing import Any

import pytest

import keyhole
from keyhole.disk.weight_files import gguf_settings
from keyhole.errors import UserError
from tests.disk.published import write_gguf


def change(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | values))


OTHER = {  # key of config.json -> (its value there, what the file says)
    "num_attention_heads": (2, "attention.head_count = 4"),
    "num_key_value_heads": (1, "attention.head_count_kv = 2"),
    "hidden_size": (64, "embedding_length = 32"),
    "intermediate_size": (32, "feed_forward_length = 64"),
    "num_hidden_layers": (3, "block_count = 2"),
    "rms_norm_eps": (1e-5, "attention.layer_norm_rms_epsilon = 1e-06"),
    "rope_theta": (5e5, "rope.freq_base = 10000"),
}


@pytest.mark.parametrize("wire", [None, "int4"])
@pytest.mark.parametrize("key", OTHER)
def test_a_config_of_another_model_is_refused(key: str, wire: str | None, tiny_model: Path, tmp_path: Path) -> None:
    write_gguf(tiny_model, tmp_path / "in", "Q4_0")
    (value, says) = OTHER[key]
    change(tmp_path / "in", **{key: value} if key != "rope_theta" else {"rope_parameters": {"rope_theta": value}})
    with pytest.raises(UserError, match=rf"model.gguf says {says}, but config.json .* {key} = {value:g}"):
        keyhole.load(tmp_path / "in", device="cpu", dtype="float32", wire=wire)


def test_what_agrees_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    """Up to float32's digits; a config with fewer layers is warned of, and no more; other files say nothing."""
    write_gguf(tiny_model, tmp_path / "in", "Q4_0")
    change(tmp_path / "in", rms_norm_eps=1.0000001e-6)
    keyhole.load(tmp_path / "in", device="cpu", dtype="float32")
    change(tmp_path / "in", num_hidden_layers=1)
    keyhole.load(tmp_path / "in", device="cpu", dtype="float32")
    assert gguf_settings(tiny_model) == {}
