"""Settings of a method that is made without a config: checked, named as in one, and not changed later."""

import re
from dataclasses import FrozenInstanceError
from inspect import signature
from typing import Any

import pytest

import keyhole
from keyhole.errors import UserError
from keyhole.methods import CLASSES, METHODS
from keyhole.methods.settings import kinds
from tests.methods.lomo.loops import load


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("lomo", "max_grad_norm", -1.0),
        ("lomo", "max_grad_norm", 0),
        ("lomo", "weight_decay", -0.1),
        ("lomo", "weight_decay", float("inf")),
        ("lomo", "seed", -1),
        ("lomo", "clip_value", float("nan")),
        ("lomo", "fused", "no"),
        ("lomo", "weight_decay_on", "norms"),
        ("galore", "rank", 0),
        ("adamw", "beta2", 1.0),
        ("adam-offload", "eps", "1e-8"),
        ("sgd", "momentum", True),
        ("zo", "clip", -1.0),
        ("zo", "directions", 1.5),
        ("zo", "distribution", "normal"),
        ("zo", "rank", 10**6),
    ],
)
def test_settings_have_types_and_bounds_without_a_config_too(name: str, key: str, value: Any) -> None:
    """A norm or a clip below 0 would turn the gradient round, a decay below 0 would make weights grow."""
    with pytest.raises(UserError, match=rf"{key}: found {value!r}, expected "):
        METHODS[name].load()(load("llama"), 1e-3, **{key: value})


def test_help_needs_no_repository() -> None:
    """Of load every argument is explained, of a method every setting, without a word about files of keyhole."""
    told = {keyhole.load: signature(keyhole.load).parameters}
    told |= {getattr(keyhole, name): ["lr", *kinds(row.settings)] for name, row in CLASSES.items()}
    for explained, names in told.items():
        assert not [name for name in names if not re.search(rf"\b{name}\b", explained.__doc__)]
    assert not re.search(r"\.py|docs/", keyhole.load.__doc__)


def test_a_wrong_setting_is_named_as_in_a_config() -> None:
    """By section and key, so that the message fits both."""
    with pytest.raises(UserError, match=r"adam_offload\.beta1: found 1\.0, expected number >= 0"):
        keyhole.AdamOffload(load("llama"), 1e-3, beta1=1.0)


def test_settings_cannot_be_changed_once_a_method_is_made() -> None:
    """The losses of zo would be taken at the new eps and divided by the old one."""
    method = keyhole.ZO(load("llama"), 1e-3)
    with pytest.raises(FrozenInstanceError):
        method.settings.eps = 0.5  # type: ignore[misc]
    method.lr = 0.5
    for name, says in [("momentum", "it takes"), ("learning_rate", "did you mean lr"), ("beta", "it takes")]:
        with pytest.raises(UserError, match=f"settings: lomo has no {name}; {says}"):
            keyhole.LOMO(load("llama"), 1e-3, **{name: 0.9})


@pytest.mark.parametrize("name", ["lomo", "lsp", "adam-offload"])
def test_the_bits_of_attention_are_a_choice(name: str) -> None:
    """Exact by default; a user may have torch's fastest."""
    own = {"d": 16, "r": 2} if name == "lsp" else {}
    for exact in (True, False):
        assert METHODS[name].load()(load("llama"), 1e-3, deterministic=exact, **own).reverse.deterministic is exact
