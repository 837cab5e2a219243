"""adam-offload: torch's AdamW exactly, the same bits in every order and placement, and failures that stop the run."""

import math
import random
import threading
import time
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.adam_offload.method import AdamOffload
from keyhole.training.schedule import Schedule
from tests.matrix import in_every_run
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import weights
from tests.model.decoders import batch, config, load
from tests.model.streaming import streamed

HOW = {"lr": 1e-2, "weight_decay": 0.1, "weight_decay_on": "all", "beta2": 0.99}


def micro(t: int, count: int = 2) -> list:
    """The micro-batches of step t, of different lengths."""
    return [batch(seed=count * t + i, length=10 - i) for i in range(count)]


def trained(model: keyhole.Model, steps: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    """Weights after some steps."""
    method = AdamOffload(model, **HOW | options)
    for t in range(steps):
        method.step(micro(t))
    method.flush()
    found = weights(model)
    method.close()
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


@in_every_run(lambda name: name not in ("mistral", "cohere", "olmo2"))
@pytest.mark.parametrize(
    "name, clip",
    [(n, 0.5) for n in ("llama", "mistral", "qwen3", "olmo2", "cohere", "gemma2")] + [("llama", None), ("llama", 1e3)],
)
def test_equals_torch_adamw_in_a_plain_loop(name: str, clip: float | None) -> None:
    """Four fp32 steps, clipped, with 2 micro-batches, a schedule and weight decay: within 1e-6 of torch's weights."""
    ours, theirs = load(name), load(name).module
    method = AdamOffload(ours, max_grad_norm=clip, **HOW)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = Schedule("cosine", 1e-3, 20, warmup_ratio=0.1)
    for t in range(4):
        method.lr = optimizer.param_groups[0]["lr"] = schedule.rate(t)
        loss = plain_loss(theirs, micro(t))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), math.inf if clip is None else clip)
        optimizer.step()
        optimizer.zero_grad()
        assert method.step(micro(t)).item() == pytest.approx(loss.item(), rel=1e-5)
        assert float(method.metrics()["grad_norm"]) == pytest.approx(float(norm), rel=1e-5)
    expected = dict(theirs.named_parameters())
    for key, tensor in ours.named_tensors():
        error = (tensor - expected[key].data).norm() / expected[key].data.norm()
        assert error < 1e-6, (key, float(error))


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "opt", "mixtral", "gpt_neox"])
def test_equals_torch_adamw_given_the_same_gradients(name: str) -> None:
    """Biases of keys have no gradient but rounding errors, which Adam blows up in any loop; so here torch gets ours."""
    model, grads = load(name), {}
    method = AdamOffload(model, max_grad_norm=0.5, **HOW)
    params = {t.name: torch.nn.Parameter(model.home(t).clone()) for t in model.layout.tensors}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    gradient = method.gradient
    method.gradient = lambda tensor, w, grad: (grads.update({tensor.name: grad.clone()}), gradient(tensor, w, grad))
    method.gradients_together = lambda found: [method.gradient(*one) for one in found]
    for t in range(3):
        method.step(micro(t))
        for key, param in params.items():
            param.grad = grads.pop(key)
        torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
        optimizer.step()
    for key, tensor in model.named_tensors():
        assert (tensor - params[key].data).norm() <= 1e-6 * params[key].data.norm(), key


@in_every_run(lambda clip: clip is not None)
@pytest.mark.parametrize("clip, dtype", [(0.5, "bfloat16"), (None, "float32")])
def test_every_order_and_placement_gives_the_same_bits(clip: float | None, dtype: str) -> None:
    """Resident is streamed, in whole blocks or single matrices, with poisoned slots."""
    base = load(dtype=dtype)
    twins = [streamed(base), streamed(base, max_unit_numel=1, chaos=random.Random(0), slot_count=8)]
    partly = streamed(base, keep=("table", "head"), slot_count=1)
    expected = trained(load(dtype=dtype), max_grad_norm=clip)
    assert not same(expected, weights(base))
    assert same(expected, trained(load(dtype=dtype), max_grad_norm=clip, threads=2))
    for twin in (*twins, partly):
        assert same(expected, trained(twin, max_grad_norm=clip))


def test_a_table_of_several_chunks_is_treated_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of rows, tied and not, streamed and resident."""
    monkeypatch.setattr("keyhole.model.structure.layout.CHUNK_ROWS", 64)
    for tie in (False, True):
        shape = {"vocab_size": 64 + 35, "tie_word_embeddings": tie}
        base, resident = (keyhole.load(config("llama", **shape), init="random", device="cpu") for _ in range(2))
        expected = trained(resident, 2, max_grad_norm=1.0)
        assert same(expected, trained(streamed(base), 2, max_grad_norm=1.0, gpu_updates=True))


def test_bfloat16_weights_are_the_rounded_master() -> None:
    """At home lies the master rounded once; the master moves where the weight cannot."""
    model = load(dtype="bfloat16")
    method = AdamOffload(model, lr=1e-5)
    method.step(batch())
    state = method.state_dict()
    for name, tensor in model.named_tensors():
        assert torch.equal(tensor, state[f"{name}/master"].bfloat16())
    moved = [(state[f"{t.name}/exp_avg"] != 0).float().mean() for t in model.layout.of_kind("block")[0].tensors]
    assert min(moved) > 0.9


def test_state_is_views_of_12_bytes_a_parameter() -> None:
    """Saving copies nothing."""
    model = load()
    method = AdamOffload(model)
    state = method.state_dict()
    flats = {flat.untyped_storage().data_ptr() for flat in method.updates.states.arrays.values()}
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    assert {t.untyped_storage().data_ptr() for t in tensors} == flats
    assert sum(t.numel() * t.element_size() for t in tensors) == 12 * sum(t.shape.numel() for t in model.layout.tensors)


def test_frozen_tensors_stay_and_unused_ones_get_no_decay() -> None:
    """As in torch: no gradient, no update, not even weight decay."""
    for place in (lambda m: m, streamed):
        model = place(load())
        frozen = [t for t in model.layout.tensors if "k_proj" in t.name]
        for tensor in frozen:
            tensor.param.requires_grad_(False)
        before, after = weights(model), trained(model)
        for tensor in model.layout.tensors:
            assert torch.equal(before[tensor.name], after[tensor.name]) == (tensor in frozen), tensor.name


def test_updates_run_beside_the_next_forward() -> None:
    """With clipping, step returns before its updates are done, and the forward waits unit by unit, in its order."""
    model = load()
    method = AdamOffload(model, max_grad_norm=0.5, **HOW)
    release, order, update = threading.Event(), [], method.updates.by_cpu

    def slow(step: Any, unit: Any, given: list, part: Any) -> None:
        assert release.wait(20)
        order.append(unit.index)
        update(step, unit, given, part)

    method.updates.by_cpu = slow
    method.step(batch())
    assert not method.exchange.ready(model.layout.of_kind("block")[-1].index)
    release.set()
    method.flush()
    assert order[1:] == sorted(order[1:]) and len(order) == len(model.layout.units)


def test_generation_waits_for_updates() -> None:
    """The module of a resident model works as it stands, but not with weights of two steps."""
    model = load()
    method = AdamOffload(model, max_grad_norm=0.5, **HOW)
    update = method.updates.by_cpu
    method.updates.by_cpu = lambda *job: (time.sleep(0.02), update(*job))
    method.step(batch())
    model.generate(batch()["input_ids"], max_new_tokens=1)
    assert all(method.exchange.ready(unit.index) for unit in model.layout.units)
    method.close()


def test_bad_settings_are_refused() -> None:
    """Weights in a format of their own, nothing to train."""
    with pytest.raises(UserError, match="wire=null"):
        AdamOffload(load(dtype="bfloat16", wire="fp32"))
    model = load()
    model.module.requires_grad_(False)
    with pytest.raises(UserError, match="nothing to train"):
        AdamOffload(model)


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [0.5, None])
def test_every_order_and_placement_gives_the_same_bits_on_a_gpu(clip: float | None) -> None:
    """The same on streams of their own, with random delays and poisoned slots."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 9000, "num_hidden_layers": 6}

    def gpu(**options: Any) -> keyhole.Model:
        return keyhole.load(config("llama", **shape), init="random", device="cuda", dtype="bfloat16", **options)

    expected = trained(gpu(), 6, max_grad_norm=clip, gpu_updates=False)
    assert same(expected, trained(gpu(), 6, max_grad_norm=clip))
    for seed in range(3):
        model = gpu(placement="stream", chaos=random.Random(seed))
        assert same(expected, trained(model, 6, max_grad_norm=clip))
        model.close()
