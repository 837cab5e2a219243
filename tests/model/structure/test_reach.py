"""What `freeze` describes, and what it refuses."""

from typing import Any

import pytest
import torch

from keyhole.errors import UserError
from keyhole.model.structure.reach import freeze, frozen_as, is_left_out
from keyhole.model.structure.skeleton import build
from tests.model.decoders import config


def names(described: str | list[str], family: str = "llama", **changed: Any) -> list[str]:
    module = build(config(family, **changed), torch.float32)
    freeze(module, described)
    return [name for name, param in module.named_parameters() if not param.requires_grad]


def test_a_description_is_a_word_a_module_or_a_pattern() -> None:
    assert names("embeddings") == ["model.embed_tokens.weight", "lm_head.weight"]
    assert names("embeddings", "opt") == ["model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"]
    assert names("embeddings", "llama", tie_word_embeddings=True) == ["model.embed_tokens.weight"]
    assert names("lm_head", "llama", tie_word_embeddings=True) == ["model.embed_tokens.weight"]  # by its second name
    assert names(["model.norm.weight", "*.1.*up_proj*"]) == ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    assert {name.split(".")[2] for name in names("model.layers.1")} == {"1"}


@pytest.mark.parametrize(
    ("described", "says"),
    [
        ("model.layer.1", r"no parameter of LlamaForCausalLM is called 'model.layer.1'; did you mean model.layers.1"),
        ("embedding", "did you mean embeddings"),
        (["embeddings", "xyz"], "is called 'xyz'; names are such as lm_head.weight, or embeddings"),
        ("", "is called ''"),
        ("*", "every parameter is frozen"),
        ("model.nrom", r"did you mean model.norm or model.norm.weight\?$"),  # rotary_emb has none
        ("model.rotary_emb", r"is called 'model.rotary_emb'; did you mean model.norm or model.layers\?$"),
        (5, "freeze: found 5, expected text"),
        (["embeddings", None], r"freeze: found \['embeddings', None\], expected text"),
    ],
)
def test_a_description_that_fits_nothing_or_everything_is_refused(described: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        names(described)


def test_freezing_for_a_while_leaves_all_as_it_was() -> None:
    """What was described before is trained meanwhile, but not what a caller has frozen by hand; also after an error."""
    module = build(config("llama"), torch.float32)
    freeze(module, "model.layers.0")
    module.lm_head.weight.requires_grad_(False)

    def state() -> dict[str, tuple[bool, bool]]:
        return {name: (param.requires_grad, is_left_out(param)) for name, param in module.named_parameters()}

    before = state()
    with pytest.raises(ZeroDivisionError), frozen_as(module, "model.norm"):
        frozen = {name for name, (trained, _) in state().items() if not trained}
        assert frozen == {"model.norm.weight", "lm_head.weight"} and state()["model.norm.weight"][1]
        raise ZeroDivisionError
    assert state() == before
