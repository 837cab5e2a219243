"""adam-offload: torch's AdamW exactly, the same bits in every order and placement, and failures that stop the run."""

import gc
import math
import random
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.adam_lane import open_lane
from keyhole.methods.adam_offload import AdamOffload
from keyhole.offload import arena
from keyhole.offload.exchange import LANDING
from keyhole.offload.workers import WorkerFailed
from keyhole.plan.gradient import update_bytes
from keyhole.plan.memory import Workload
from keyhole.training.schedule import learning_rate
from tests.methods.test_first_order import plain_loss
from tests.model.decoders import batch, config
from tests.model.streaming import streamed

HOW = {"lr": 1e-2, "weight_decay": 0.1, "beta2": 0.99}


def load(name: str = "llama", **options: Any) -> keyhole.Model:
    return keyhole.load(config(name), init="random", device="cpu", **options)


def micro(t: int, count: int = 2) -> list:
    """The micro-batches of step t, of different lengths."""
    return [batch(seed=count * t + i, length=10 - i) for i in range(count)]


def weights(model: keyhole.Model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_tensors()}


def trained(model: keyhole.Model, steps: int = 4, **options: Any) -> dict[str, torch.Tensor]:
    """Weights after some steps."""
    method = AdamOffload(model, **HOW | options)
    for t in range(steps):
        method.step(micro(t))
    method.flush()
    found = weights(model)
    method.close()
    return found


def by_lane_alone(method: AdamOffload) -> None:
    """The worker uses the lane as well, in turn with its helper: every part goes through it."""
    lock, begin = threading.Lock(), method.updates.by_gpu

    def by_gpu(*job: Any) -> Any:
        with lock:
            begin(*job)()
        return lambda: None

    method.updates.by_cpu = method.updates.by_gpu = by_gpu


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


@pytest.mark.parametrize(
    "name, clip", [(n, 0.5) for n in ("llama", "mistral", "qwen3", "olmo2", "cohere", "gemma2")] + [("llama", None)]
)
def test_equals_torch_adamw_in_a_plain_loop(name: str, clip: float | None) -> None:
    """20 steps of fp32 with clipping, 2 micro-batches, a schedule and weight decay: within 1e-6 of torch's weights."""
    ours, theirs = load(name), load(name).module
    method = AdamOffload(ours, max_grad_norm=clip, **HOW)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for t in range(20):
        rate = learning_rate("cosine", t, 20, 1e-3, 0.1)
        method.lr = optimizer.param_groups[0]["lr"] = rate
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
    for t in range(20):
        method.step(micro(t))
        for key, param in params.items():
            param.grad = grads.pop(key)
        torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
        optimizer.step()
    for key, tensor in model.named_tensors():
        assert (tensor - params[key].data).norm() <= 1e-6 * params[key].data.norm(), key


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("clip", [0.5, None])
def test_every_order_and_placement_gives_the_same_bits(clip: float | None, dtype: str) -> None:
    """Layerwise is monolithic is streamed, in whole blocks or single matrices, with poisoned slots."""
    base = load(dtype=dtype)
    twins = [streamed(base), streamed(base, max_unit_numel=1, chaos=random.Random(0), slot_count=8)]
    partly = streamed(base, keep=("table", "head"), slot_count=2)
    expected = trained(load(dtype=dtype), max_grad_norm=clip)
    assert not same(expected, weights(base))
    assert same(expected, trained(load(dtype=dtype), max_grad_norm=clip, schedule="monolithic"))
    assert same(expected, trained(load(dtype=dtype), max_grad_norm=clip, threads=2))
    for twin in (*twins, partly):
        assert same(expected, trained(twin, max_grad_norm=clip))
    assert same(expected, trained(streamed(base), max_grad_norm=clip, schedule="monolithic"))


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_who_updates_a_part_changes_no_bit(place: str, clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the worker alone, by both, and by the lane alone, in parts and chunks that cut tensors anywhere."""

    def model() -> keyhole.Model:
        found = load(dtype="bfloat16")
        return found if place == "resident" else streamed(found)

    expected = trained(model(), max_grad_norm=clip)
    assert same(expected, trained(model(), max_grad_norm=clip, gpu_updates=True))
    monkeypatch.setattr("keyhole.methods.adam_state.PART", 192)
    monkeypatch.setattr("keyhole.offload.lane.CHUNK", 128)
    assert same(expected, trained(model(), max_grad_norm=clip, gpu_updates=True))
    alone = model()
    method = AdamOffload(alone, max_grad_norm=clip, gpu_updates=True, **HOW)
    by_lane_alone(method)
    for t in range(4):
        method.step(micro(t))
    method.flush()
    assert same(expected, weights(alone)) and method.metrics()["gpu_updates"] == 1.0
    method.close()


def test_what_goes_through_the_lane_is_counted() -> None:
    """Resident, 16 bit: 14 bytes a parameter up and 12 + 2 down, instead of 4 and 2."""
    model, moved = load(dtype="bfloat16"), []
    for alone in (False, True):
        method = AdamOffload(model, gpu_updates=alone, **HOW)
        if alone:
            by_lane_alone(method)
        up, down = model.engine.bytes_up, model.engine.bytes_down
        method.step(batch())
        method.flush()
        moved.append((model.engine.bytes_up - up, model.engine.bytes_down - down))
        method.close()
    numel = sum(unit.numel for unit in method.state.units)
    assert moved[1][0] - moved[0][0] == 10 * numel and moved[1][1] - moved[0][1] == 12 * numel


@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_tensors_without_a_gradient_change_no_neighbour(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables in chunks of rows, some tensors frozen, others without a gradient in some steps: parts begin anywhere, and
    counts of updates differ within a unit."""
    monkeypatch.setattr("keyhole.methods.adam_state.PART", 64 * 47)
    monkeypatch.setattr("keyhole.offload.lane.CHUNK", 64 * 11)
    found = []
    for alone in (False, True):
        model = keyhole.load(config("llama", vocab_size=8192 + 100), init="random", device="cpu", dtype="float16")
        for tensor in model.layout.tensors:
            tensor.param.requires_grad_("k_proj" not in tensor.name)
        model = streamed(model) if place == "streamed" else model
        method = AdamOffload(model, gpu_updates=alone, **HOW | {"weight_decay": 0.0, "beta1": 0.4})
        if alone:
            by_lane_alone(method)
        gradient = method.gradient
        for t in range(3):
            left_out = ("none", "layers.0.mlp.up", "layers.1.self_attn.q")[t]
            method.gradient = lambda tensor, *more, left_out=left_out, gradient=gradient: (
                None if left_out in tensor.name else gradient(tensor, *more)
            )
            method.step(batch(seed=t))
        state = method.state_dict()
        found.append({k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)} | weights(model))
        assert {v for k, v in state.items() if k.endswith("/step")} == {2, 3}
        method.close()
    assert same(*found)


def test_the_share_of_the_gpu_is_of_the_last_step_also_after_a_flush() -> None:
    """A checkpoint flushes twice, and the next step finds nothing more to count: it stays what it was."""
    model = load()
    for tensor in model.layout.tensors:
        tensor.param.requires_grad_("k_proj" not in tensor.name)  # what is not trained is no part of the share
    method = AdamOffload(model, gpu_updates=True, **HOW)
    by_lane_alone(method)
    method.step(batch())
    for _ in range(2):
        method.flush()
        assert method.metrics()["gpu_updates"] == 1.0
    method.step(batch())
    assert method.metrics()["gpu_updates"] == 1.0
    method.close()


def test_the_plan_counts_what_the_lane_takes() -> None:
    """Also where the spine is the largest unit."""
    for shape in ({}, {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "max_position_embeddings": 4096}):
        name = "gpt2" if shape else "llama"
        model = keyhole.load(config(name, **shape), init="random", device="cpu", dtype="bfloat16")
        method = AdamOffload(model, gpu_updates=True, **HOW)
        buffers = [b for slot in method.lane.lane.slots for b in slot.buffers]
        lane_bytes = sum(b.numel() * b.element_size() for b in buffers)
        work = Workload(method="adam-offload", tokens=1, passes=1)
        assert update_bytes(model.layout, set(), work, 2) - 4 * LANDING == lane_bytes
        method.close()


def test_the_demo_sized_vocabulary_is_chunked_alike() -> None:
    """A table of several row chunks, tied and not, streamed and resident."""
    for tie in (False, True):
        shape = {"vocab_size": 8192 + 100, "tie_word_embeddings": tie}
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


@pytest.mark.parametrize("clip", [0.5, None])
def test_resume_is_exact(clip: float | None) -> None:
    """3 + 3 steps are 3 steps, a stop, and 3 more, also from resident to streamed."""
    whole = trained(load(dtype="bfloat16"), 6, max_grad_norm=clip)
    first = load(dtype="bfloat16")
    before = AdamOffload(first, max_grad_norm=clip, **HOW)
    for t in range(3):
        before.step(micro(t))
    before.flush()
    for second in (load(dtype="bfloat16"), streamed(load(dtype="bfloat16"))):
        after = AdamOffload(second, max_grad_norm=clip, **HOW)
        after.load_state_dict(
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in before.state_dict().items()}
        )
        for t in range(3, 6):
            after.step(micro(t))
        assert same(whole, weights(second))


def test_state_is_views_of_12_bytes_a_parameter() -> None:
    """Saving copies nothing."""
    model = load()
    method = AdamOffload(model)
    state = method.state_dict()
    flats = {flat.untyped_storage().data_ptr() for flat in method.state.flats}
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    assert {t.untyped_storage().data_ptr() for t in tensors} == flats
    assert sum(t.numel() * t.element_size() for t in tensors) == 12 * sum(t.shape.numel() for t in model.layout.tensors)


def test_frozen_units_have_no_state() -> None:
    """Page-locking takes all of the arrays at once: they hold what is trained, and state is found in its place."""
    found = []
    for frozen in ("layers.0.", "embed_tokens"):
        models = [load(dtype="bfloat16") for _ in range(2)]
        for model in models:
            for tensor in model.layout.tensors:
                tensor.param.requires_grad_(frozen not in tensor.name)
        first, second = (AdamOffload(model, **HOW) for model in models)
        layout, units = models[0].layout, [u for u in models[0].layout.units if u.tensors[-1].param.requires_grad]
        assert {flat.numel() for flat in first.state.flats} == {sum(u.numel for u in units)} != {layout.numel}
        first.step(batch())
        state = first.state_dict()
        assert not any(frozen in key for key in state)
        for name, tensor in models[0].named_tensors():
            assert f"{name}/master" not in state or torch.equal(tensor, state[f"{name}/master"].bfloat16())
        second.load_state_dict(state)
        found.append(same(weights(models[0]), weights(models[1])))
    assert all(found)


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


@pytest.mark.parametrize("schedule", ["layerwise", "monolithic"])
@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_a_step_that_is_not_finite_changes_nothing(place: str, schedule: str) -> None:
    """A broken loss gives no update, with or without clipping; the next good step goes on as if it had not been."""
    for clip in (0.5, None):
        models = [load(), load()]
        models = [streamed(m) for m in models] if place == "streamed" else models
        broken, clean = (AdamOffload(m, max_grad_norm=clip, schedule=schedule, **HOW) for m in models)
        for method in (broken, clean):
            method.step(micro(0))
        forward, broken.reverse.forward = broken.reverse.forward, _spoilt(broken)
        broken.step(micro(1))
        assert not math.isfinite(float(broken.metrics()["grad_norm"]))
        broken.reverse.forward = forward
        for method in (broken, clean):
            method.flush()
            method.step(micro(2))
        assert same(weights(models[0]), weights(models[1]))


def _spoilt(method: AdamOffload) -> Any:
    forward = method.reverse.forward

    def spoilt(batches: list) -> torch.Tensor:
        loss = forward(batches)
        method.reverse.ends.token_count = float("nan")
        return loss * float("nan")

    return spoilt


def test_a_step_applied_in_part_stops_the_run() -> None:
    """Without clipping a bad gradient may be met after others were applied: never silently."""
    model = load()
    method = AdamOffload(model, **HOW)
    gradient, before = method.gradient, weights(model)
    saved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in method.state_dict().items()}

    def spoilt(tensor: Any, w: torch.Tensor, grad: torch.Tensor) -> None:
        gradient(tensor, w, grad * float("inf") if "layers.0.mlp" in tensor.name else grad)

    method.gradient = spoilt
    method.step(batch())
    with pytest.raises(UserError, match="last checkpoint"):
        method.flush()
    with pytest.raises(UserError, match="max_grad_norm"):
        method.step(batch())
    assert not same(before, weights(model))
    method.load_state_dict(saved)
    method.gradient = gradient
    assert same(before, weights(model))
    method.step(batch())
    method.flush()


@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_an_error_in_the_reverse_leaves_the_weights_as_they_were(place: str) -> None:
    """With clipping nothing is applied yet: the step can be tried again. Without, it may be too late, and is said."""
    for clip in (0.5, None):
        models = [load(), load()]
        models = [streamed(m) for m in models] if place == "streamed" else models
        broken, clean = (AdamOffload(m, max_grad_norm=clip, **HOW) for m in models)
        gradient = broken.gradient

        def fail(tensor: Any, w: torch.Tensor, grad: torch.Tensor, gradient: Any = gradient) -> None:
            gradient(tensor, w, grad)
            if "layers.0.mlp" in tensor.name:
                raise MemoryError("no room")

        broken.gradient = fail
        with pytest.raises(MemoryError, match="no room"):
            broken.step(micro(0))
        broken.gradient = gradient
        if clip is None:
            with pytest.raises(UserError, match="last checkpoint"):
                broken.flush()
            continue
        assert same(weights(models[0]), weights(models[1]))
        for method in (broken, clean):
            method.step(micro(1))
        assert same(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_an_interrupt_at_the_end_of_the_reverse_is_said(place: str) -> None:
    """Updates wait for the last norm: if only some were submitted, or weights did not return, the step is broken."""
    for options in ({"max_grad_norm": 0.5}, {"schedule": "monolithic"}):
        model = load() if place == "resident" else streamed(load())
        method = AdamOffload(model, **HOW | options)
        submit, count = method.exchange.submit, []

        def interrupted(*args: Any, submit: Any = submit, count: list = count, **more: Any) -> None:
            count.append(1)
            if len(count) == 3:
                raise KeyboardInterrupt
            submit(*args, **more)

        method.exchange.submit = interrupted
        with pytest.raises(KeyboardInterrupt):
            method.step(batch())
        with pytest.raises(UserError, match="last checkpoint"):
            method.flush()
        assert all(tensor.isfinite().all() for tensor in weights(model).values()) and not method.exchange.leaving
        method.close()


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_a_bad_gradient_is_met_in_every_part(place: str, clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units in many parts, some by the lane: a step that is not finite leaves weights, moments and counts alone."""
    monkeypatch.setattr("keyhole.methods.adam_state.PART", 192)
    model = load(dtype="bfloat16") if place == "resident" else streamed(load(dtype="bfloat16"))
    method = AdamOffload(model, max_grad_norm=clip, gpu_updates=True, **HOW)
    method.step(micro(0))
    before = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in method.state_dict().items()}
    held = weights(model)
    method.reverse.forward = _spoilt(method)
    method.step(micro(1))
    after = method.state_dict()
    assert same(held, weights(model))
    assert all(torch.equal(v, after[k]) if isinstance(v, torch.Tensor) else v == after[k] for k, v in before.items())
    method.close()


def test_a_lane_that_fails_stops_the_run_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the device comes to the caller as one of the worker does."""
    method = AdamOffload(load(), gpu_updates=True, **HOW)
    threads, hold = list(method.pool._threads), threading.Event()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("keyhole.methods.adam_lane.host_adamw_", fail)
    method.updates.by_cpu = lambda *job: hold.wait(20)
    with pytest.raises(WorkerFailed, match="the device is gone"):
        method.step(batch())
        method.flush()
    hold.set()
    method.close()
    assert not any(thread.is_alive() for thread in threads)


def test_everything_goes_with_the_method() -> None:
    """Dropped without a word, with updates under way: threads end and host memory is given back; the model stays."""
    model = load()
    for _ in range(2):
        method = AdamOffload(model, max_grad_norm=0.5, gpu_updates=True, **HOW)
        method.step(batch())
        threads = list(method.pool._threads)
        parts = [weakref.ref(part) for part in (method, method.state, method.lane, method.exchange)]
        del method
        gc.collect()
        assert not any(thread.is_alive() for thread in threads) and not any(part() for part in parts)
        assert model.engine.gate is None


def test_memory_that_is_refused_in_part_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU works alone then; what was page-locked for the lane is given back (the master is locked once more)."""
    method, pinned = AdamOffload(load(), **HOW), set()
    monkeypatch.setattr("keyhole.methods.adam_lane.use_kernel", lambda device: True)
    monkeypatch.setattr("keyhole.methods.adam_lane.squares_of_host", lambda *args, **more: "apart")
    monkeypatch.setattr(arena, "pin", lambda flat, device: len(pinned) < 2 and not pinned.add(flat.data_ptr()))
    monkeypatch.setattr(arena, "unpin", lambda flat: pinned.discard(flat.data_ptr()))
    engine = SimpleNamespace(cuda=True, device=torch.device("cpu"))
    lane, why = open_lane(method.state, engine, torch.float32)
    assert lane is None and "page-locked" in why and not pinned
    method.close()


@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_a_worker_that_fails_stops_the_run_with_its_cause(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after it, or flush, raises the cause; no thread is left and nothing hangs."""
    model = load() if place == "resident" else streamed(load())
    method = AdamOffload(model, **HOW)
    method.step(batch())
    method.flush()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("the host is full")

    monkeypatch.setattr("keyhole.methods.adam_state.host_adamw_", fail)
    with pytest.raises(WorkerFailed, match="the host is full") as caught:
        for _ in range(3):
            method.step(batch())
    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(WorkerFailed):
        method.flush()
    method.pool._threads[0].join(10)
    assert method.pool._threads[0] not in threading.enumerate()
    method.close()


def test_the_worker_ends_with_the_model() -> None:
    """close() of the model, as the trainer calls it, leaves no thread."""
    model = load()
    method = AdamOffload(model, **HOW)
    method.step(batch())
    method.flush()
    model.close()
    assert method.pool._threads[0] not in threading.enumerate()


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


def test_host_memory_is_checked_before_anything_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how much is missing."""
    from keyhole.plan.host import HostMemory

    monkeypatch.setattr("keyhole.plan.states.host_memory", lambda: HostMemory(2**30, 1000, None))
    with pytest.raises(UserError, match="16 bytes a parameter.*missing"):
        AdamOffload(load())


def test_bad_settings_are_refused() -> None:
    """An unknown schedule, weights in a format of their own, nothing to train."""
    with pytest.raises(UserError, match="layerwise, monolithic"):
        AdamOffload(load(), schedule="eager")
    with pytest.raises(UserError, match="wire=null"):
        AdamOffload(load(dtype="bfloat16", wire="fp32"))
    model = load()
    model.module.requires_grad_(False)
    with pytest.raises(UserError, match="nothing to train"):
        AdamOffload(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("clip", [0.5, None])
def test_every_order_and_placement_gives_the_same_bits_on_a_gpu(clip: float | None) -> None:
    """The same on streams of their own, with random delays and poisoned slots."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 9000, "num_hidden_layers": 6}

    def gpu(**options: Any) -> keyhole.Model:
        return keyhole.load(config("llama", **shape), init="random", device="cuda", dtype="bfloat16", **options)

    expected = trained(gpu(), 6, max_grad_norm=clip, gpu_updates=False)
    assert same(expected, trained(gpu(), 6, max_grad_norm=clip, schedule="monolithic"))
    assert same(expected, trained(gpu(), 6, max_grad_norm=clip))
    for seed in range(3):
        model = gpu(placement="stream", chaos=random.Random(seed))
        assert same(expected, trained(model, 6, max_grad_norm=clip))
        model.close()
