"""adam-offload: what the GPU updates instead of the CPU: the same bits, counted, planned; a failure is said."""

import threading
from typing import Any

import pytest
import torch

import keyhole
from keyhole.methods.adam_offload.exchange import SLOTS, Lane
from keyhole.methods.adam_offload.method import AdamOffload
from keyhole.methods.adam_offload.updates import help_of_gpu
from keyhole.offload import arena
from keyhole.offload.workers import WorkerFailed
from tests.methods.adam_offload.test_method import HOW, load, micro, same, trained, weights
from tests.model.decoders import batch, config
from tests.model.streaming import streamed


def by_lane_alone(method: AdamOffload) -> None:
    """The worker uses the lane as well, in turn with its helper: every part goes through it."""
    lock, begin = threading.Lock(), method.updates.by_gpu

    def by_gpu(*job: Any) -> Any:
        with lock:
            begin(*job)()
        return lambda: None

    method.updates.by_cpu = method.updates.by_gpu = by_gpu


@pytest.mark.parametrize("place, clip", [("resident", 0.5), ("streamed", None)])
def test_who_updates_a_part_changes_no_bit(place: str, clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the worker alone, by both, and by the lane alone, in parts and chunks that cut tensors anywhere."""

    def model() -> keyhole.Model:
        found = load(dtype="bfloat16")
        return found if place == "resident" else streamed(found)

    expected = trained(model(), 2, max_grad_norm=clip)
    monkeypatch.setattr("keyhole.methods.adam_offload.updates.PART", 192)
    assert same(expected, trained(model(), 2, max_grad_norm=clip, gpu_updates=True))
    alone = model()
    method = AdamOffload(alone, max_grad_norm=clip, gpu_updates=True, **HOW)
    by_lane_alone(method)
    for t in range(2):
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
    numel = sum(unit.numel for unit in method.updates.units)
    assert moved[1][0] - moved[0][0] == 10 * numel and moved[1][1] - moved[0][1] == 12 * numel


@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_tensors_without_a_gradient_change_no_neighbour(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables in chunks of rows, some tensors frozen, others without a gradient in some steps: parts begin anywhere, and
    counts of updates differ within a unit."""
    monkeypatch.setattr("keyhole.model.structure.layout.CHUNK_ROWS", 64)
    monkeypatch.setattr("keyhole.methods.adam_offload.updates.PART", 64 * 47)
    found = []
    for alone in (False, True):
        model = keyhole.load(config("llama", vocab_size=64 + 35), init="random", device="cpu", dtype="bfloat16")
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


def test_a_lane_that_fails_stops_the_run_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the device comes to the caller as one of the worker does."""
    method = AdamOffload(load(), gpu_updates=True, **HOW)
    threads, hold = list(method.updates.pool._threads), threading.Event()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("keyhole.methods.adam_offload.updates.host_adamw_", fail)
    method.updates.by_cpu = lambda *job: hold.wait(20)
    with pytest.raises(WorkerFailed, match="the device is gone"):
        method.step(batch())
        method.flush()
    hold.set()
    method.close()
    assert not any(thread.is_alive() for thread in threads)


def test_memory_that_is_refused_in_part_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU works alone then; what was page-locked for the lane is given back (the master is locked once more)."""
    method, pinned = AdamOffload(load(), **HOW), set()
    monkeypatch.setattr("keyhole.methods.adam_offload.updates.use_kernel", lambda device: True)
    monkeypatch.setattr("keyhole.methods.adam_offload.updates.squares_of_host", lambda *args, **more: "apart")
    monkeypatch.setattr(arena, "pin", lambda flat, device: len(pinned) < 2 and not pinned.add(flat.data_ptr()))
    monkeypatch.setattr(arena, "unpin", lambda flat: pinned.discard(flat.data_ptr()))
    squares, why = help_of_gpu(method.updates.states, method.updates.rule, torch.device("cpu"))
    assert not squares and "page-locked" in why and not pinned
    method.close()


@pytest.mark.gpu
def test_ranges_go_through_the_lane_one_after_the_other() -> None:
    """More chunks than slots, a last one that is shorter, twice; the third tensor stays as it was."""
    dtypes, numel = [torch.float32, torch.float32, torch.bfloat16], 1000 * (2 * SLOTS + 1) + 10
    lane, seen = Lane(dtypes, torch.device("cuda"), chunk=1000), []
    flats = [(torch.arange(numel) % 97 + k).to(dtype).pin_memory() for k, dtype in enumerate(dtypes)]
    before = [flat.clone() for flat in flats]

    def change(begin: int, chunks: list[torch.Tensor]) -> None:
        seen.append((begin, chunks[0].numel()))
        chunks[0].add_(chunks[2])
        chunks[1].mul_(2)
        chunks[2].zero_()

    ends = [lane.run(flats, 2, change) for _ in range(2)]
    for end in ends:
        end()
    assert sum(count for _, count in seen) == 2 * flats[0].numel() and seen[0] == (0, 1000)
    assert torch.equal(flats[0], before[0] + 2 * before[2].float())
    assert torch.equal(flats[1], 4 * before[1]) and torch.equal(flats[2], before[2])
