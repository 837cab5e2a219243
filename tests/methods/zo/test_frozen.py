"""Directions of low rank over a frozen base: what they are over the unpacked weights, anywhere, and on disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import keyhole
from keyhole.errors import UserError
from tests.model.decoders import batch, config

HOW = {"lr": 1e-2, "eps": 1e-2, "rank": 2, "refresh": 2, "fold": False}


def steps(model: keyhole.Model, count: int = 5, **how: Any) -> tuple[list[float], keyhole.ZO]:
    method = keyhole.ZO(model, **HOW | how)
    return [float(method.step(batch(seed=t))) for t in range(count)], method


def load(**how: Any) -> keyhole.Model:
    return keyhole.load(config(how.pop("name", "llama")), init="random", device="cpu", **how)


@pytest.mark.parametrize("wire, name", [("int4", "llama"), ("nf4", "opt"), ("int8", "gpt2")])
def test_equals_the_same_over_unpacked_weights(wire: str, name: str, tmp_path: Path) -> None:
    """Resident and streamed to the bit, and those of a plain model that holds the unpacked weights; the packed bytes
    never change, and nothing of the blocks goes home."""
    packed, away = load(name=name, wire=wire), load(name=name, wire=wire, placement="stream")
    packed.save_pretrained(tmp_path / "unpacked")
    plain = keyhole.load(tmp_path / "unpacked", device="cpu")
    before = [packed.engine.homes[u.index].clone() for u in packed.layout.of_kind("block")]
    losses = [steps(model)[0] for model in (packed, away, plain)]
    assert losses[0] == losses[1] == losses[2]
    after = [packed.engine.homes[u.index] for u in packed.layout.of_kind("block")]
    assert all(map(torch.equal, before, after))


def test_what_was_learned_is_merged_when_it_is_saved(tmp_path: Path) -> None:
    """Tensor by tensor, into an ordinary directory: Transformers computes what we evaluate."""
    model = load(wire="int4", placement="stream")
    _, method = steps(model)
    method.flush()
    nll_B, count_B = model.nll(batch(seed=9))
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(nll_B.sum(), again(**batch(seed=9)).loss * count_B.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", [{"rank": None, "fold": True}, {"fold": True}])
def test_weights_that_would_change_are_not_packed(how: dict[str, Any]) -> None:
    """Full rank, and factors that are folded, would write to the frozen weights."""
    with pytest.raises(UserError, match="wire"):
        steps(load(wire="int4"), **how)


def test_stopped_and_resumed_equals_through() -> None:
    """The state is the factors alone, and what is outside of the blocks, also in a budget that cuts these into other
    units; packed weights are those of the original model."""
    through, _ = steps(load(wire="int4"), 5)
    first, method = steps(load(wire="int4"), 3)
    small = load(wire="int4", placement="auto", gpu_memory="120KiB", workload=keyhole.Workload("zo", tokens=20))
    assert len(small.layout.units) > len(method.model.layout.units)
    again = keyhole.ZO(small, **HOW)
    state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in method.state_dict().items()}
    again.load_state_dict(state)
    assert first + [float(again.step(batch(seed=t))) for t in (3, 4)] == through


def test_a_sample_moves_across_the_end_of_a_period() -> None:
    """What was learned is sampled with the periods that are kept: at their ends nothing seems to be as at the start."""
    model = load(wire="int4")
    tensor = next(t for u in model.layout.of_kind("block") for t in u.tensors if len(t.shape) == 2)
    method = keyhole.ZO(model, **HOW)
    before = method.directions.layers.sample(tensor).clone()
    for t in range(2):
        method.step(batch(seed=t))
    assert not method.factors.now[: method.factors.parts.a_numel].any()
    assert not torch.equal(method.directions.layers.sample(tensor), before)


def test_a_light_checkpoint_is_a_model_over_the_base_it_was_trained_on(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Its losses are those of the merged model: the original weights are packed as the run had them."""
    from keyhole.config import TrainConfig
    from keyhole.methods.zo.traits import ZOConfig
    from keyhole.training.start import train

    own = ZOConfig(rank=2, refresh=1, fold=False)
    where = {"model": str(tiny_model), "train_data": str(tiny_data), "output_dir": str(tmp_path / "out")}
    how = {"device": "cpu", "wire": "int4", "learning_rate": 1e-3, "max_steps": 3, "batch_size": 4, "zo": own}
    assert train(TrainConfig(method="zo", **where, **how)) == 0
    light = keyhole.load(tmp_path / "out" / "checkpoint-3", device="cpu")
    merged = keyhole.load(tmp_path / "out", device="cpu")
    assert light.formats.name == "int4" and merged.formats.name is None
    one = batch()
    torch.testing.assert_close(light.nll(one)[0], merged.nll(one)[0], rtol=1e-5, atol=1e-5)
