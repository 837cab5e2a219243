"""What a config.json and a generation_config.json may say, and what identifies a model."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import keyhole
from keyhole.errors import UserError
from keyhole.model.structure.config_files import (
    check_config_file,
    check_loss,
    config_fault,
    identity,
    read_generation_config,
)

LIMITS = [("num_hidden_layers", 4096), ("hidden_size", 2**22), ("head_dim", 2**22), ("n_positions", 2**28)]


def test_sizes_that_no_model_has_and_code_from_elsewhere_are_refused(tmp_path: Path) -> None:
    """Also in a config inside of the config; the largest that is allowed passes."""
    file = tmp_path / "config.json"

    def refused(**config: Any) -> str:
        file.write_text(json.dumps(config))
        try:
            check_config_file(file)
        except UserError as error:
            return str(error)
        return ""

    for key, most in LIMITS:
        assert refused(**{key: most}) == refused(other=most + 1) == ""
        for size in (most + 1, most + 0.5):
            told = refused(**{key: size})
            assert f"{key} is {size:g}, more than any" in told and told == refused(text_config={key: size})
    assert "beyond all numbers" in refused(hidden_size=10**400)
    assert refused(model_type="llama", dtype=None, architectures=["A"], attn_implementation="sdpa") == ""
    assert "model_type is 3; a word" in refused(model_type=3)
    for architectures in ("A", [1]):
        assert "a list of names is expected" in refused(architectures=architectures)
    assert "would fetch that code" in refused(text_config={"attn_implementation": "a/b"})


def test_what_identifies_a_config() -> None:
    """Keys of configs inside it count; dtype does under either name; who wrote the file does not."""
    inside = {"text_config": {"eps": 1, "transformers_version": "4"}, "torch_dtype": "float32"}
    assert identity(inside) == identity({"dtype": "float32", "text_config": {"eps": 1}, "_name_or_path": "x"})
    assert identity(inside) == {"text_config.eps": 1, "dtype": "float32"}
    assert config_fault(None, {"eps": 1}) is config_fault({"eps": 1}, {"eps": 1}) is None
    assert config_fault({"a": 1}, {"b": 2}) == "has another config.json: a was 1 then, and is None now"


def test_a_loss_beside_that_of_the_tokens_is_refused() -> None:
    """That of the routers only where their logits are asked for, wherever in the config; one that is 0 is none."""
    inside = SimpleNamespace(router_aux_loss_coef=0.1)
    outside = SimpleNamespace(sub_configs={"text_config": 0}, text_config=inside, z_loss_coefficient=0.0)
    check_loss(outside)
    outside.output_router_logits = True
    with pytest.raises(UserError, match='router_aux_loss_coef is 0.1 .*"router_aux_loss_coef": 0.0 or "output_router'):
        check_loss(outside)
    inside.router_aux_loss_coef = 0.0
    check_loss(outside)
    outside.z_loss_coefficient = 0.5
    with pytest.raises(
        UserError, match='z_loss_coefficient is 0.5 in its config: .*Write "z_loss_coefficient": 0.0 in'
    ):
        check_loss(outside)


def test_generation_config_survives_a_round_trip(tiny_model: Path, tmp_path: Path) -> None:
    """To the byte, with settings that Transformers would refuse to write."""
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    (file := broken / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.6, "top_p": 0.9}')
    keyhole.load(broken, device="cpu").save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    (broken / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="generation_config.json cannot be read"):
        keyhole.load(broken, device="cpu")


ODD = {
    "a million beams": ({"num_beams": 10**6}, "num_beams is 1000000; a whole number from 1 to 256"),
    "a word for a temperature": ({"temperature": "hot"}, "temperature is 'hot'; a number is expected"),
    "an infinite temperature": ({"temperature": 1e999}, "temperature is inf"),
    "a word for a token": ({"eos_token_id": ["</s>"]}, "eos_token_id is .*a token id, or a list of them"),
    "a length of 10^30": ({"max_new_tokens": 10**30}, "max_new_tokens is 1000"),
    "no beam": ({"num_beams": 0}, "num_beams is 0"),
    "a truth for a number": ({"top_p": True, "num_beams": 256}, "top_p is True; a number"),
    "a truth for a count": ({"top_k": True}, "top_k is True; a whole number from 0 to 2147483647"),
    "no token": ({"eos_token_id": []}, "eos_token_id is .*a token id, or a list of them"),
    "a token beyond all": ({"pad_token_id": [-1, 2**31]}, "pad_token_id is .*a token id, or a list of them"),
    "what contradicts itself": ({"num_beams": 1, "num_return_sequences": 3}, "cannot be read"),
    "a list": ([], "generation_config.json cannot be read.*holds a list"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_generation_settings_are_named(tmp_path: Path, name: str) -> None:
    """When the file is read, not at the first answer."""
    settings, says = ODD[name]
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=says):
        read_generation_config(tmp_path)
