"""Gradients of experts that come one by one: those of torch, and the bits of the resident model."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import keyhole
from keyhole.methods.apollo_mini.method import APOLLOMini
from keyhole.methods.lomo.adalomo import AdaLOMO
from keyhole.methods.lomo.lomo_lora import LOMOLoRA
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.lora.method import LoRA
from keyhole.methods.workload import Workload
from keyhole.model.backward.memory import slot_count
from keyhole.model.structure import find as stacks
from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from keyhole.plan import fit
from tests.matrix import in_every_run
from tests.model.decoders import batch, config
from tests.model.streaming import streamed

FAMILIES = ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next"]


def load(name: str, **options: object) -> keyhole.Model:
    return keyhole.load(config(name), init="random", device="cpu", **options)


@pytest.fixture(autouse=True)
def small_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stack of experts counts as large."""
    monkeypatch.setattr(stacks, "STACK_NUMEL", 0)


def twin(resident: keyhole.Model, seed: int = 0) -> Any:
    """Streamed in single matrices and experts, through as few slots as the plan has."""
    layout = find_layout(build(resident.config, resident.dtype), 1)
    assert layout.has_expert_units
    return streamed(resident, 1, chaos=random.Random(seed), slot_count=slot_count(layout))


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_tensors()}


def learns_alike(resident: keyhole.Model, make: Callable[[Any], Any], steps: Any) -> None:
    """Losses and weights of resident and streamed experts are the same."""
    pair = [make(model) for model in (resident, twin(resident))]
    for batches in steps:
        assert torch.equal(*(one.step(batches) for one in pair))
    mine, theirs = (weights(one.model) for one in pair)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@in_every_run(lambda name, count: count == 2 or name == "mixtral")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("count", [1, 2])
def test_lomo_by_expert_is_sgd(name: str, count: int) -> None:
    """One step, of one micro-batch or two, with weight decay: torch's SGD on the same module."""
    model, other = load(name), load(name)
    batches = [batch(2, 7, seed=i) for i in range(count)]
    LOMO(model, lr=0.1, weight_decay=0.1, weight_decay_on="all").step(batches)
    module = AutoModelForCausalLM.from_config(config(name))
    module.load_state_dict(other.module.state_dict())
    losses = [module(**one, use_cache=False).loss for one in batches]
    torch.stack(losses).mean().backward()
    trained = [p for p in module.parameters() if p.grad is not None]
    torch.optim.SGD(trained, lr=0.1, weight_decay=0.1).step()
    found = weights(model)
    for key, param in module.named_parameters():
        if key in found:
            torch.testing.assert_close(found[key], param.data, rtol=1e-5, atol=1e-6)


METHODS: dict[str, Callable[[Any], Any]] = {
    "lomo": lambda model: LOMO(model, lr=0.1),
    "lomo, clipped, decay": lambda model: LOMO(model, lr=0.1, max_grad_norm=0.5, weight_decay=0.1),
    "lomo, in host memory": lambda model: LOMO(model, lr=0.1, activations="host"),
    "lomo, not fused": lambda model: LOMO(model, lr=0.1, clip_value=0.01, fused=False),
    "adalomo": lambda model: AdaLOMO(model, lr=1e-2),
    "adalomo, decay": lambda model: AdaLOMO(model, lr=1e-2, weight_decay=0.1),
    "apollo-mini": lambda model: APOLLOMini(model, lr=1e-2),
    "lora": lambda model: LoRA(model, lr=1e-2),
    "lomo-lora": lambda model: LOMOLoRA(model, lr=0.1),
}
ALIKE = ("lomo", "lomo-lora")  # in `make test` in float32: others round in the same way


@in_every_run(lambda method, dtype: (dtype == "bfloat16") == (method not in ALIKE) and method != "adalomo")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_streamed_experts_learn_like_resident_ones(method: str, dtype: str) -> None:
    """Steps on one micro-batch, on one token and on two micro-batches: losses and weights to the bit."""
    steps = [batch(1, 4)], [batch(1, 5, seed=1)], [batch(1, 5, seed=2), batch(2, 4, seed=3)]
    learns_alike(load("mixtral", dtype=dtype), METHODS[method], steps)


@in_every_run(lambda name: name in ("gpt_oss", "deepseek_v3"))
@pytest.mark.parametrize("name", FAMILIES)
def test_families_learn_with_streamed_experts(name: str) -> None:
    """Two steps in bfloat16: losses and weights to the bit."""
    learns_alike(load(name, dtype="bfloat16"), METHODS["lomo"], [[batch(2, 6, seed=i)] for i in range(2)])


def test_only_experts_that_tokens_met_cross_the_link() -> None:
    """Two tokens meet up to four experts of each block; what none of them met does not come, and does not change."""
    model = twin(keyhole.load(config("mixtral", num_local_experts=8), init="random", device="cpu"))
    method = LOMO(model, lr=0.1)
    one = batch(1, 4)
    one = {"input_ids": one["input_ids"][:, :2], "labels": one["input_ids"][:, :2]}
    method.step(one)
    met = {page for page in model.engine.visited if model.layout.units[page].expert is not None}
    assert 0 < len(met) <= 2 * 2 * 4  # blocks, stacks, experts of two tokens
    before = weights(model)
    method.step(one)
    visits = Counter(page for page in model.engine.visited if model.layout.units[page].expert is not None)
    assert set(visits.values()) == {2}  # forward and reverse: for its second run a block does without them
    changed = {
        tensor.expert(e).name
        for tensor in model.layout.tensors
        for e in range(tensor.experts)
        if not torch.equal(before[tensor.name][e], weights(model)[tensor.name][e])
    }
    units = [model.layout.units[page] for page in set(model.engine.visited)]
    assert changed  # the last token has no loss, and some expert perhaps no other token
    assert changed <= {u.tensors[0].expert(u.expert).name for u in units if u.expert is not None}


def test_a_loss_of_ones_own_updates_by_expert() -> None:
    """backward(loss) on the module is step(batch), within rounding."""
    one = batch(2, 6)
    stepped, walked = (AdaLOMO(load("mixtral"), lr=1e-2) for _ in range(2))
    stepped.step(one)
    walked.backward(walked.model.module(**one, use_cache=False).loss)
    mine, theirs = weights(stepped.model), weights(walked.model)
    for key in mine:
        torch.testing.assert_close(mine[key], theirs[key], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("method", [keyhole.ZO, LOMO, AdaLOMO])
def test_experts_on_a_gpu(name: str, method: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """With streams delayed at random, streamed experts train to the bits of the resident model."""
    monkeypatch.setattr(fit, "UNIT_BYTES", 4)
    options = {"init": "random", "device": "cuda", "dtype": "bfloat16", "workload": Workload(method=method.row.name)}
    resident = keyhole.load(config(name), **options)
    other = keyhole.load(config(name), placement="stream", chaos=random.Random(2), **options)
    assert other.layout.has_expert_units and not resident.layout.has_expert_units
    losses = []
    for model in (resident, other):
        one = method(model, 1e-3)
        losses.append(torch.stack([one.step([batch(1, 5, seed=i), batch(2, 4, seed=9 + i)]) for i in range(4)]))
        one.flush()
    assert torch.equal(*losses)
    mine, theirs = weights(resident), weights(other)
    assert all(torch.equal(mine[key].cpu(), theirs[key].cpu()) for key in mine)
