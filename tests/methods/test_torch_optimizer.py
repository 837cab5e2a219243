"""The state of a method, and of its torch optimizer: kept to the bit, and refused if it is that of another."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods import METHODS
from tests.matrix import in_every_run
from tests.methods.lomo.loops import load, micro_batches, weights
from tests.methods.schedulers import SCHEDULERS


@in_every_run(lambda name: name in ("zo", "lomo", "lsp", "adam-offload", "adamw"))
@pytest.mark.parametrize("name", [name for name in METHODS if name != "lora"])
def test_the_state_of_the_torch_optimizer_is_that_of_the_method(name: str, tmp_path: Path) -> None:
    """A loop that saves the optimizer and the scheduler, as loops do, goes on to the bit: moments, counts and rate."""
    if "lora" in name:
        pytest.importorskip("peft")
    own = {"d": 16, "r": 2} if name == "lsp" else {}
    runs = []
    for stops in (False, True):
        model = load("llama")
        method = METHODS[name].load()(model, 1e-3, **own)
        scheduler = SCHEDULERS["lambda"](method.torch_optimizer)
        for t in range(3):
            if stops and t == 2:
                kept = {"optimizer": method.torch_optimizer.state_dict(), "scheduler": scheduler.state_dict()}
                torch.save(kept, tmp_path / "state.pt")
                saved, model = weights(model), load("llama")
                with torch.no_grad():
                    for tensor in model.layout.tensors:
                        tensor.param.copy_(saved[tensor.name])
                method = METHODS[name].load()(model, 7.0, **own)
                scheduler = SCHEDULERS["lambda"](method.torch_optimizer)
                kept = torch.load(tmp_path / "state.pt", weights_only=True)
                method.torch_optimizer.load_state_dict(kept["optimizer"])
                scheduler.load_state_dict(kept["scheduler"])
            method.step(micro_batches(t, 1))
            scheduler.step()
        method.flush()
        runs.append((weights(model), method.param_groups[0]["lr"]))
    assert runs[0][1] == runs[1][1]
    if name != "lomo-lora":  # its weights are saved with the adapters added
        assert all(torch.equal(runs[0][0][key], runs[1][0][key]) for key in runs[0][0])


def test_a_torch_optimizer_s_state_that_would_lose_something_is_refused() -> None:
    """One that holds the rate only, as those of earlier versions, or that of torch or of another method."""
    shell = keyhole.AdamOffload(load("llama"), 1e-3).torch_optimizer
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    for state in ({"state": {}, "param_groups": shell.state_dict()["param_groups"]}, plain.state_dict(), None):
        with pytest.raises(UserError, match="this state is no method's, expected one"):
            shell.load_state_dict(state)
    with pytest.raises(UserError, match="this state is that of lomo, expected one"):
        shell.load_state_dict(keyhole.LOMO(load("llama"), 1e-3).torch_optimizer.state_dict())


@pytest.mark.parametrize("method", [name for name in METHODS if name != "lora"])
@pytest.mark.parametrize("state", [{}, {"step_count": "many", "seed": None}, {"x": 1}, None], ids=str)
def test_a_state_of_something_else_is_refused(method: str, state: Any) -> None:
    """By name, and not with a KeyError, also by methods whose own state may be empty."""
    made = METHODS[method].load()(load("llama"), 1e-2)
    with pytest.raises(UserError, match=f"{method}: this is not a state that"):
        made.load_state_dict(state)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [("adalomo", "lomo"), ("lomo", "zo"), ("adam-offload", "adamw"), ("adamw", "sgd"), ("sgd", "adamw")],
)
def test_the_state_of_another_method_is_refused(found: str, wanted: str) -> None:
    """Also where its names are those of the method: the moments would be dropped, or begin at 0, in silence."""
    made = METHODS[found].load()(load("llama"), 1e-3)
    made.step(micro_batches(0, 1))
    with pytest.raises(UserError, match=f"{wanted}: this is the state of another method, {found}"):
        METHODS[wanted].load()(load("llama"), 1e-3).load_state_dict(made.state_dict())


@pytest.mark.parametrize(
    ("name", "saved", "made", "says"),
    [
        ("lsp", {"d": 16, "r": 2}, {"d": 8, "r": 2}, "does not fit: make the method as it was made"),
        ("lora", {"r": 4}, {"r": 8}, "does not fit: make the method as it was made"),
        ("zo", {"seed": 7}, {"seed": 8}, "seed"),
        ("zo", {"rank": 2, "fold": False}, {}, "learned low-rank factors, which would be lost"),
    ],
)
def test_the_state_of_other_settings_is_refused(
    name: str, saved: dict[str, Any], made: dict[str, Any], says: str
) -> None:
    """By a message of its own, and not by torch's alone; nothing that was learned is left out in silence."""
    method = METHODS[name].load()(load("llama"), 1e-3, **saved)
    method.step(micro_batches(0, 1))
    with pytest.raises(UserError, match=says):
        METHODS[name].load()(load("llama"), 1e-3, **made).load_state_dict(method.state_dict())


def test_a_model_is_not_copied() -> None:
    """By pickle, copy, or a library that copies what it is given; nor with a method of it."""
    model = load("llama")
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UserError, match="a model holds .* is not copied or pickled; load it again"):
            make(model)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UserError, match="not copied or pickled"):
            make(keyhole.LOMO(model, 1e-3))
