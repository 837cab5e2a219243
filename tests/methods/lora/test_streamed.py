"""LoRA behind the link: to the bit what it is on the device, whatever is kept, cut or dropped."""

from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.lora.method import LoRA
from tests.matrix import in_every_run
from tests.model.decoders import batch, config

pytest.importorskip("peft")


def trained(steps: int = 3, name: str = "llama", load: Any = None, of_model: Any = None, **options: Any) -> tuple:
    """Losses, adapters and norm after some steps of two micro-batches."""
    model = keyhole.load(config(name, **of_model or {}), init="random", **{"device": "cpu"} | (load or {}))
    method = LoRA(model, lr=1e-2, r=4, seed=3, **{"max_grad_norm": 0.5, "weight_decay": 0.1} | options)
    losses = [float(method.step([batch(seed=2 * t), batch(seed=2 * t + 1)])) for t in range(steps)]
    adapters = {key: param.detach().clone() for key, param in method.params.items()}
    return losses, adapters, float(method.metrics()["grad_norm"]), model


def assert_same(ours: tuple, theirs: tuple) -> None:
    assert ours[0] == theirs[0] and ours[2] == theirs[2]
    assert all(torch.equal(ours[1][key], theirs[1][key]) for key in theirs[1])


@in_every_run(lambda name: name in ("gpt2", "mixtral", "gemma3"))
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mixtral", "gemma3"])
def test_streamed_equals_resident_to_the_bit(name: str) -> None:
    """Losses, norms and adapters after three clipped steps of two micro-batches; nothing goes home."""
    resident, away = trained(name=name), trained(name=name, load={"placement": "stream"})
    assert_same(away, resident)
    assert away[3].engine.streamed and away[3].engine.bytes_down == 0


@pytest.mark.parametrize("kept", ["none", "block", "host"])
def test_what_is_kept_changes_no_bit(kept: str) -> None:
    """Of a model with dropout in its blocks and in the adapters."""
    how = {"name": "gpt2", "of_model": {"resid_pdrop": 0.2}, "dropout": 0.3}
    assert_same(trained(activations=kept, **how), trained(load={"placement": "stream"}, **how))


def test_sixteen_bit_homes_and_wider_ones_stream_too() -> None:
    """bf16 weights, and fp32 weights at home that are computed in bf16: streamed equals resident."""
    for wire in (None, "fp32"):
        how = {"dtype": "bfloat16", "wire": wire}
        assert_same(trained(load=how | {"placement": "stream"}), trained(load=how))


def test_graphs_of_all_blocks_need_all_weights() -> None:
    with pytest.raises(UserError, match="activations: none"):
        trained(load={"placement": "stream"}, activations="none")


def test_dropout_of_adapters_is_drawn_per_step_and_learns_otherwise() -> None:
    """Losses differ from those without dropout, and the model's own dropout may be off beside it."""
    plain, dropped = trained(), trained(dropout=0.5)
    assert plain[0][0] == dropped[0][0] and plain[0][2] != dropped[0][2]  # B is zero at the start
    assert_same(trained(dropout=0.5, model_dropout=False), dropped)
