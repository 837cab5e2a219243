"""Which tensors decay: Hugging Face's, for every decoder and every method, wherever the weights are."""

from typing import Any

import pytest
import torch
from transformers import Trainer

import keyhole
from keyhole.methods import METHODS
from keyhole.methods.settings import MethodSettings
from keyhole.methods.weight_decay import weight_decay_of
from tests.matrix import in_every_run
from tests.model.decoders import NAMES, batch, config
from tests.model.streaming import streamed

OWN = {"lsp": {"d": 8, "r": 2}, "galore": {"rank": 4}, "adalomo": {"max_grad_norm": 1.0}}
PLACES = [(name, "resident") for name in METHODS if name != "lora"]
PLACES += [(name, "streamed") for name, row in METHODS.items() if row.streams and "lora" not in name] + [("zo", "fp8")]


@pytest.mark.parametrize("name", NAMES)
def test_spares_what_hugging_face_spares(name: str) -> None:
    """By the Trainer's own function, name for name."""
    module = keyhole.load(config(name), init="random", device="cpu").module
    theirs = set(Trainer.get_decay_parameter_names(None, module))
    decay = weight_decay_of(module, MethodSettings(weight_decay=0.1))
    assert {key for key, p in module.named_parameters(remove_duplicate=False) if decay.of(p)} == theirs


def stepped(method: str, place: str, **decay: Any) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Weights after two updates, and the names of those that do not decay."""
    how = {"dtype": "bfloat16", "wire": "fp8", "placement": "stream"} if place == "fp8" else {}
    model = keyhole.load(config("opt"), init="random", device="cpu", **how)
    model = streamed(model, slot_count=2) if place == "streamed" else model
    opt = METHODS[method].load()(model, lr=0.1, **OWN.get(method, {}), **decay)
    opt.step(batch())
    opt.flush()
    found = {t.name: model.home(t).float().clone() for t in model.layout.tensors}
    return found, {
        t.name
        for t in model.layout.tensors
        if id(t.param) in weight_decay_of(model.module, MethodSettings(weight_decay=1.0)).spared
    }


@in_every_run(lambda method, place: place != "resident" or (method, "streamed") not in PLACES or method == "zo")
@pytest.mark.parametrize(("method", "place"), PLACES)
def test_norms_and_biases_do_not_decay_unless_asked(method: str, place: str) -> None:
    """One step from the same weights: what is spared moves as without decay, the rest as when all decay."""
    (none, spared), (some, _), (everything, _) = (
        stepped(method, place, weight_decay=rate, weight_decay_on=on)
        for rate, on in ((0.0, "matrices"), (0.5, "matrices"), (0.5, "all"))
    )
    assert 0 < len(spared) < len(none)
    for name in none:
        assert torch.equal(some[name], (none if name in spared else everything)[name]), name
    assert any(not torch.equal(everything[name], none[name]) for name in spared)
    assert any(not torch.equal(some[name], none[name]) for name in none)
