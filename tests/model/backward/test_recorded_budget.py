"""Recordings and kept activations within a budget, on a CPU that pretends to have one: what they may take, and when
they give it back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import keyhole
from keyhole.model.backward.kept_blocks import SHARE, KeptBlocks
from keyhole.model.backward.memory import recording_bytes
from keyhole.model.backward.recorded import has_room
from keyhole.model.spare_memory import SpareMemory, left_of
from tests.model.backward.test_recorded_replay import METHODS, recording
from tests.model.decoders import batch, config

WORK = keyhole.Workload("lomo", tokens=12, passes=2)
ROWS = {"rows": 2, "length": 6}


def plan(room: float, planned: int = 1000) -> Any:
    """A budget with so much room beside the planned step."""
    at_most = SimpleNamespace(total=planned)
    found = {"budget_bytes": planned + int(room), "device_bytes": at_most, "workspace_bytes": 7}
    return SimpleNamespace(**found, work=WORK, is_for_another_method=False)


def with_budget(name: str, room: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A method that records within a budget, and its recorder; the allocator holds what recordings hold."""
    monkeypatch.setattr(
        SpareMemory, "left", lambda self: left_of(self.placed, 2**60, self.held.total(), self.held.total())
    )
    model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float32", seed=3)
    method = METHODS[name](model)
    recorded = recording(method)
    recorded.spare = SpareMemory(plan(room), recorded.device)
    return method, recorded


def on_a_gpu(model: Any) -> Any:
    """The model as far as its room is asked for."""
    return SimpleNamespace(layout=model.layout, dtype=model.dtype, device=torch.device("cuda"))


def test_passes_of_a_step_have_room_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the planned step, or nothing is recorded."""
    monkeypatch.setattr(SpareMemory, "left", lambda self: left_of(self.placed, 2**60, 0))
    model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float32")
    one, gpu = recording_bytes(model.layout, 4, WORK.tokens), on_a_gpu(model)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = [has_room(gpu, SpareMemory(plan(share * one + 7), gpu.device)) for share in (1, 1.9, 2)]
    assert found == [False, False, True]


def test_nothing_more_is_recorded_when_recordings_hold_more_than_there_was_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was estimated too low ends there; what is recorded is still replayed."""
    method, recorded = with_budget("lomo", 2**30, monkeypatch)
    for step in range(4):
        method.step(batch(**ROWS, seed=step))
    count, replays = len(recorded.recordings), recorded.replays
    recorded.spare.held["graphs"] = 2**31
    method.step(batch(**ROWS, seed=4))
    for _ in range(3):
        method.step([batch(**ROWS, seed=5), batch(**ROWS, seed=6)])
    assert count and len(recorded.recordings) == count and recorded.replays > replays


@pytest.mark.parametrize("name", ["lomo", "lomo clipped", "adalomo", "adam-offload", "lsp", "lora"])
@pytest.mark.parametrize("longer", ["rows", "micro-batches"])
def test_a_step_beyond_the_plan_has_the_whole_budget(name: str, longer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings and the buffer of gradients are given up before it, for good, and all steps have the same bits as
    without recordings."""
    beyond = [batch(rows=3, length=6, seed=9)] if longer == "rows" else [batch(**ROWS, seed=i) for i in range(3)]
    steps: list[Any] = [batch(**ROWS, seed=step) for step in range(4)] + [beyond] + [batch(**ROWS, seed=8)] * 3
    method, recorded = with_budget(name, 2**30, monkeypatch)
    model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float32", seed=3)
    plain = METHODS[name](model)
    for number, each in enumerate(steps):
        assert float(method.step(each)) == float(plain.step(each))
        assert (method.reverse.recorded is None) == (number >= 4)
        assert number == 0 or bool(recorded.recordings) == (number <= 3)
    assert recorded.replays and not recorded.spare.held
    for each in (method, plain):
        each.flush()
    pairs = zip(method.model.layout.tensors, model.layout.tensors, strict=True)
    assert all(torch.equal(method.model.home(mine), model.home(theirs)) for mine, theirs in pairs)


def test_a_budget_for_another_method_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan says nothing of the steps that will run (keyhole.load without a workload plans for zo)."""
    how: dict[str, Any] = {"device": "cpu", "dtype": "float32", "init": "random", "placement": "resident"}
    for work in (None, WORK):
        model = keyhole.load(config("llama"), gpu_memory=2**30, workload=work, **how)
        keyhole.LOMO(model)
        monkeypatch.setattr(SpareMemory, "left", lambda self: 2**30)
        assert has_room(on_a_gpu(model), SpareMemory(model.placed, torch.device("cuda"))) == (work is not None)


def test_blocks_keep_no_activations_in_what_recordings_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in what they held when the peak was measured, of which it counts all but the temporaries in the pool of
    graphs, nor in what they took since. What is given up may be used again."""
    layers, unit = 40, 2**20
    peak, reserved = 30 * unit, 35 * unit
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 * unit, 1000 * unit))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    spare = SpareMemory(plan(70 * unit, 30 * unit), torch.device("cuda"))
    kept = KeptBlocks.__new__(KeptBlocks)
    layout = SimpleNamespace(block_count=layers)
    kept.model = SimpleNamespace(device=spare.device, engine=SimpleNamespace(streamed=()), layout=layout)  # type: ignore[assignment]
    kept.spare, kept.room, kept.bytes_per_token = spare, {}, unit // 8
    spare.held.update({"graphs": 4 * unit, "kept graphs": 3 * unit, "static memory": 2 * unit})

    def blocks(tokens: int) -> float:
        return layers - kept.first_kept(tokens)

    assert blocks(16) == -float("inf")  # it is measured
    assert blocks(16) == int(SHARE * (100 - 30 - 4) / 2)
    spare.held["kept graphs"] += 20 * unit
    assert blocks(16) == int(SHARE * (100 - 30 - 4 - 20) / 2)
    spare.held.clear()
    assert blocks(16) == int(SHARE * (100 - 30 + 3 + 2) / 2)
