"""The rate and the parameter group of a method: by torch's schedulers, and what is refused there."""

from typing import Any

import numpy as np
import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods import METHODS
from tests.matrix import in_every_run
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import load, micro_batches, weights
from tests.methods.schedulers import SCHEDULERS


@in_every_run(lambda name, kind: kind == next(iter(SCHEDULERS)) or name in ("zo", "lomo", "adamw"))
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("name", METHODS)
def test_torch_s_schedulers_set_the_rate_of_every_method(name: str, kind: str) -> None:
    """Three steps at the rates that torch gives to an optimizer of its own."""
    row = METHODS[name]
    own = row.settings()
    if name == "lora":
        pytest.importorskip("peft")
    model = keyhole.load(load("llama").config, init="random", device="cpu")
    method = row.load()(model, 1e-3, **vars(own))
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=method.lr)
    ours, theirs = SCHEDULERS[kind](method.torch_optimizer), SCHEDULERS[kind](plain)
    rates, expected = [], []
    for t in range(3):
        method.step(micro_batches(t, 1))
        plain.step()
        rates.append(method.lr)
        expected.append(plain.param_groups[0]["lr"])
        ours.step()
        theirs.step()
    assert rates == expected and rates[0] > rates[1] > rates[2]
    assert method.param_groups is method.torch_optimizer.param_groups and method.param_groups[0]["params"]


@pytest.mark.parametrize("name", ["lomo", "adamw", "zo"])
@pytest.mark.parametrize("rate", [torch.tensor(-1.0), -1, float("nan"), "3e-3", None, torch.ones(2)])
def test_what_is_no_number_is_no_rate(name: str, rate: Any) -> None:
    """Set on the method or in its group; a tensor with one number is one, as in torch."""
    method = METHODS[name].load()(load("llama"), 1e-3)
    method.lr = rate
    with pytest.raises(UserError, match="lr: .* is no learning rate"):
        method.step(micro_batches(0, 1))
    method.lr = torch.tensor(0.5)
    method.step(micro_batches(0, 1))
    assert method.lr == method.param_groups[0]["lr"] == 0.5
    method.param_groups[0]["lr"] = rate
    with pytest.raises(UserError, match="lr: .* is no learning rate"):
        method.step(micro_batches(0, 1))


@pytest.mark.parametrize("name", ["zo", "lomo", "lomo-lora", "lora", "lsp", "adam-offload", "adamw", "sgd", "galore"])
def test_one_number_in_a_tensor_or_an_array_is_a_rate_from_the_start(name: str) -> None:
    """As for a rate that is set later."""
    for rate in (np.float32(0.5), np.array(0.5), torch.tensor(0.5)):
        assert METHODS[name].load()(load("llama"), rate).lr == 0.5


@pytest.mark.parametrize(("key", "value"), [("weight_decay", 0.1), ("momentum", 0.9), ("betas", (0.9, 0.95))])
def test_a_setting_in_the_group_that_no_method_reads_is_refused(key: str, value: Any) -> None:
    """It would have no effect, and the weights would stay as they are until then."""
    model = load("llama")
    method, before = keyhole.LOMO(model, 1e-2), weights(model)
    method.param_groups[0][key] = value
    with pytest.raises(UserError, match=f"param_groups: {key} has no effect here"):
        method.step(micro_batches(0, 1))
    assert all(torch.equal(before[name], now) for name, now in weights(model).items())
    del method.param_groups[0][key]
    method.step(micro_batches(0, 1))


def test_parameters_that_are_taken_out_of_the_group_and_other_groups_are_refused() -> None:
    """They would be trained on, and the rate of another group would become that of all parameters."""
    changes: list[Any] = [
        lambda groups: groups[0]["params"].pop(),
        lambda groups: groups.append({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0}),
        lambda groups: groups.clear(),
    ]
    for change in changes:
        method = keyhole.LOMO(load("llama"), 1e-3)
        change(method.param_groups)
        with pytest.raises(UserError, match="param_groups: groups or parameters were added or taken out"):
            method.step(micro_batches(0, 1))


def test_the_torch_optimizer_tells_what_it_does_not_do() -> None:
    """A loop that takes it for a real one would train nothing."""
    model = load("llama")
    shell = keyhole.LOMO(model, 1e-2).torch_optimizer
    plain_loss(model.module, micro_batches(0, 1)).backward()
    with pytest.raises(UserError, match="has left gradients that it does not apply"):
        shell.step()
