"""`load_state_dict` in a loop of one's own: the state replaces the old one, is a copy, and is that of this model."""

import copy
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.methods.states import FORMATS, StatePages
from tests.matrix import in_every_run
from tests.methods.lomo.loops import weights
from tests.model.decoders import batch, config
from tests.model.streaming import trained
from tests.training.runs import same as equal

OWN: dict[str, dict[str, Any]] = {"lsp": {"d": 16, "r": 2, "learn": False}, "galore": {"rank": 4}}


def make(name: str, **changes: Any) -> tuple[keyhole.Model, Method]:
    model = keyhole.load(config("llama", **changes), init="random", device="cpu")
    return model, METHODS[name].load()(model, 1e-2, **OWN.get(name, {}))


def step(method: Method, seed: int) -> dict[str, torch.Tensor]:
    """What the method has trained after a step: weights, or adapters."""
    method.step(batch(seed=seed))
    method.flush()
    return trained(method)


@pytest.mark.parametrize("name", METHODS)
def test_an_earlier_state_forgets_what_came_later(name: str) -> None:
    """Weights and state set back to the beginning, two steps are those of a new method."""
    model, method = make(name)
    first = weights(model)
    state = copy.deepcopy(method.state_dict())
    wanted = [step(method, seed) for seed in (1, 2)]
    for own, tensor in model.named_tensors():
        tensor.copy_(first[own])
    method.load_state_dict(state)
    assert all(equal(step(method, seed), after) for seed, after in zip((1, 2), wanted, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_a_loaded_state_is_a_copy(name: str) -> None:
    """Of a method that goes on: its next steps do not change the moments of the other."""
    (_, method), (other_model, other) = make(name), make(name)
    step(method, 1)
    first = weights(method.model)
    for own, tensor in other_model.named_tensors():
        tensor.copy_(first[own])
    other.load_state_dict(method.state_dict())
    wanted = step(method, 2)
    step(method, 3)
    assert equal(step(other, 2), wanted)


@in_every_run(lambda name, changes: name == "lomo" or "intermediate_size" in changes)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("changes", [{"intermediate_size": 48}, {"num_hidden_layers": 4}], ids=["narrower", "deeper"])
def test_the_state_of_another_model_is_refused(name: str, changes: dict[str, Any]) -> None:
    state = make(name)[1].state_dict()
    with pytest.raises(UserError, match=f"{name}: this is the state of another model: names or shapes"):
        make(name, **changes)[1].load_state_dict(state)


@pytest.mark.parametrize("family", ["llama", "mixtral", "opt"])
def test_the_fingerprint_of_a_model_does_not_depend_on_its_placement(family: str) -> None:
    ways = [{}, {"placement": "stream"}, {"placement": "stream", "expert_units": False}, {"wire": "fp8"}]
    found = {keyhole.load(config(family), init="random", device="cpu", **way).layout.fingerprint for way in ways}
    assert len(found) == 1


def test_pages_of_states_have_aligned_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the units that have a state, and of no others; on a CPU nothing is page-locked."""
    monkeypatch.setattr("keyhole.offload.arena.pin", lambda *of: pytest.fail("it was page-locked"))
    pages = StatePages({0: 3, 2: 200}, FORMATS["bfloat16"], torch.device("cpu"), slots=1)
    assert [home.numel() for home in pages.homes] == [3, 0, 200] and pages.units == {0, 2}
    assert pages.bytes == 406 and pages.homes[2].data_ptr() - pages.homes[0].data_ptr() == 256
    with pages.sweep([0, 2]):
        pages.acquire(0).fill_(1.0)
        pages.acquire(2).fill_(2.0)
        assert set(pages.engine.held) == {2}, "the first was written back for the second"
    assert not pages.engine.held and pages.homes[0].tolist() == [1.0] * 3 and pages.homes[2].tolist() == [2.0] * 200
