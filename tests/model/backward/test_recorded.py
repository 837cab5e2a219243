"""Recorded blocks: the same bits as blocks that are launched kernel by kernel, for every method that has a reverse."""

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import pytest
import torch

import keyhole
from tests.matrix import in_every_run
from tests.model.decoders import batch, config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations may be kept whatever else is on the GPU: other processes of these tests, for one."""
    monkeypatch.setattr("keyhole.model.backward.activation_store.SPARE", 0.0)


METHODS: dict[str, Callable[[Any], Any]] = {
    "lomo": lambda model: keyhole.LOMO(model, 1e-2),
    "lomo clipped": lambda model: keyhole.LOMO(model, 1e-2, max_grad_norm=0.5, weight_decay=0.1),
    "lomo each element": lambda model: keyhole.LOMO(model, 1e-2, clip_value=1e-3),
    "adalomo": lambda model: keyhole.AdaLOMO(model, 1e-3),
    "adam-offload": lambda model: keyhole.AdamOffload(model, 1e-3),
    "adam-offload clipped": lambda model: keyhole.AdamOffload(model, 1e-3, max_grad_norm=0.5),
    "lsp": lambda model: keyhole.LSP(model, 1e-3, d=8, r=2, check_freq=5),
    "lsp clipped": lambda model: keyhole.LSP(model, 1e-3, d=8, r=2, learn=False, max_grad_norm=0.5),
    "lomo-lora": lambda model: keyhole.LOMOLoRA(model, 1e-2, r=2),
}


def trained(name: str, graphs: bool, micro_batches: int, **how: Any) -> tuple[list[float], list[torch.Tensor], Any]:
    """Losses and weights after steps on batches of two lengths with a rate that changes, and the method."""
    model = keyhole.load(config("llama"), init="random", device="cuda", reverse_graphs=graphs, seed=3, **how)
    method, losses = METHODS[name](model), []
    for step in range(8):
        method.lr = 1e-3 * (8 - step) / 8
        batches = [batch(rows=2, length=(6, 9)[step % 2], seed=10 * step + i) for i in range(micro_batches)]
        losses.append(float(method.step(batches)))
    method.flush()
    return losses, [model.home(tensor).float().cpu() for tensor in model.layout.tensors], method


@in_every_run(lambda dtype, micro_batches: (dtype == "float32") == (micro_batches == 2))
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", METHODS)
def test_recorded_blocks_give_the_same_bits(name: str, dtype: str, micro_batches: int) -> None:
    """Losses and weights with recordings equal those without, and recordings were used."""
    plain = trained(name, False, micro_batches, dtype=dtype)
    recorded = trained(name, True, micro_batches, dtype=dtype)
    assert recorded[0] == plain[0]
    assert all(map(torch.equal, recorded[1], plain[1]))
    assert plain[2].reverse.recorded is None
    kinds = [key[0] for key, one in recorded[2].reverse.recorded.recordings.items() if one is not None]
    assert "forward" in kinds and "reverse" in kinds, recorded[2].reverse.recorded.why


def within(name: str, budget: int | None) -> tuple[list[float], bytes, int, int, int]:
    """In a process of its own, because a budget counts all that the process holds: losses, weights, recordings, the
    bytes of the planned step, and the largest number of bytes reserved."""
    work = keyhole.Workload(name.split()[0], tokens=2 * 9, passes=2, clips="clipped" in name)
    how = {"dtype": "bfloat16", "placement": "resident", "gpu_memory": budget, "workload": work}
    losses, weights, method = trained(name, True, 2, **how)
    found = method.reverse.recorded
    count = 0 if found is None else sum(one is not None for one in found.recordings.values())
    weights = torch.cat([w.flatten() for w in weights]).numpy().tobytes()
    return losses, weights, count, method.model.placed.device_bytes.total, torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("name", ["lomo", "lomo clipped", "adam-offload", "lsp"])
def test_a_budget_with_room_records_and_one_without_does_not(name: str) -> None:
    """The same bits in both, and as without a budget; both keep their budget. (16 MiB are less than cuBLAS takes for a
    stream on which graphs are captured.)"""
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        expected, weights, count, planned, _ = pool.apply(within, (name, None))
        roomy, of_roomy, recorded, _, reserved = pool.apply(within, (name, 2**30))
        tight, of_tight, eager, _, little = pool.apply(within, (name, planned + 2**24))
    assert recorded == count > 0 and eager == 0
    assert expected == roomy == tight
    assert weights == of_roomy == of_tight
    assert reserved <= 2**30 and little <= planned + 2**24


KEEPING: dict[str, Callable[..., Any]] = {
    "lomo": lambda model, **how: keyhole.LOMO(model, 1e-2, **how),
    "lomo clipped": lambda model, **how: keyhole.LOMO(model, 1e-2, max_grad_norm=0.5, **how),
    "adalomo": lambda model, **how: keyhole.AdaLOMO(model, 1e-3, **how),
    "adam-offload": lambda model, **how: keyhole.AdamOffload(model, 1e-3, **how),
    "lsp": lambda model, **how: keyhole.LSP(model, 1e-3, d=8, r=2, check_freq=5, **how),
    "lora": lambda model, **how: keyhole.LoRA(model, 1e-3, r=2, **how),
}


@in_every_run(lambda name, micro_batches: (micro_batches == 2) == (name in ("lomo clipped", "lsp", "lora")))
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", KEEPING)
def test_recordings_that_keep_activations_give_the_same_bits(name: str, micro_batches: int) -> None:
    """Batches of two lengths that alternate, so that each length's activations must survive the other's steps, and of a
    third one later."""
    found = []
    for graphs, activations in ((False, "block"), (True, "auto")):
        how = {"dtype": "bfloat16", "seed": 3, "reverse_graphs": graphs}
        model = keyhole.load(config("llama"), init="random", device="cuda", **how)
        method, losses = KEEPING[name](model, activations=activations), []
        for step in range(16):
            length = (6, 9)[step % 2] if step < 8 else (6, 12)[step % 2]
            batches = [batch(rows=2, length=length, seed=10 * step + i) for i in range(micro_batches)]
            losses.append(float(method.step(batches)))
        method.flush()
        found.append((losses, [t.detach().clone() for t in model.module.state_dict().values()]))
    recorded = method.reverse.recorded
    kinds = [key for key, one in recorded.recordings.items() if key[0] != "update" and one is not None]
    kept = [kind for kind in kinds if kind[0] == "reverse" and kind[-1]]
    assert kept and not any(kind[0] == "reverse" and not kind[-1] for kind in kinds), recorded.why
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("name", ["lomo", "lsp"])
def test_kept_activations_survive_passes_of_other_lengths(name: str) -> None:
    """Lengths of the two micro-batches of a step are first recorded apart, and then mixed: passes that were recorded
    earlier are replayed between the forward of a block and its reverse."""
    lengths = [(9, 9)] * 3 + [(6, 6)] * 3 + [(9, 6)] * 3 + [(6, 9)] * 3 + [(12, 6)] * 3 + [(9, 12)] * 3 + [(6, 9)] * 2
    found = []
    for graphs, activations in ((False, "block"), (True, "auto")):
        how = {"dtype": "bfloat16", "seed": 3, "reverse_graphs": graphs}
        model = keyhole.load(config("llama"), init="random", device="cuda", **how)
        method = KEEPING[name](model, activations=activations)
        losses = [
            float(method.step([batch(rows=2, length=length, seed=10 * step + i) for i, length in enumerate(pair)]))
            for step, pair in enumerate(lengths)
        ]
        method.flush()
        found.append((losses, [model.home(tensor).clone() for tensor in model.layout.tensors]))
    assert any(key[-1] for key, one in method.reverse.recorded.recordings.items() if one and key[0] == "reverse")
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


COMPILED: dict[str, Callable[[Any], Any]] = {
    "lomo, all kept": lambda model: keyhole.LOMO(model, 1e-2, max_grad_norm=0.5, compile=True, activations="none"),
    "lsp": lambda model: keyhole.LSP(model, 1e-3, d=8, r=2, check_freq=5, compile=True),
}


@pytest.mark.parametrize("name", COMPILED)
def test_recorded_compiled_blocks_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are recorded from the function that runs otherwise, with its graph if activations are kept."""
    monkeypatch.setitem(METHODS, name, COMPILED[name])
    plain = trained(name, False, 1, dtype="bfloat16")
    recorded = trained(name, True, 1, dtype="bfloat16")
    blocks = recorded[2].reverse.recorded
    kinds = [key for key, one in blocks.recordings.items() if key[0] != "update" and one is not None]
    reverses = [bool(kind[-1]) for kind in kinds if kind[0] == "reverse"]
    assert plain[2].reverse.recorded is None
    assert reverses and all(kept == ("all kept" in name) for kept in reverses), blocks.why
    assert recorded[0] == plain[0]
    assert all(map(torch.equal, recorded[1], plain[1]))


@pytest.mark.parametrize("name", ["lomo", "adalomo", "lsp", "adam-offload"])
def test_recorded_blocks_of_a_streamed_model(name: str) -> None:
    """Slots are addresses too: streamed and recorded equals resident and not recorded."""
    streamed = trained(name, True, 1, dtype="bfloat16", placement="stream")
    resident = trained(name, False, 1, dtype="bfloat16")
    assert streamed[0] == resident[0]
    assert all(map(torch.equal, streamed[1], resident[1]))


@pytest.mark.parametrize("name", ["lomo", "adam-offload"])
def test_kept_activations_give_the_same_bits(name: str) -> None:
    """Blocks that keep their graphs, because they fit, and blocks that run twice."""
    made = {"lomo": keyhole.LOMO, "adam-offload": keyhole.AdamOffload}[name]
    found = []
    for activations in ("block", "auto"):
        how = {"dtype": "bfloat16", "seed": 3, "reverse_graphs": False}  # small blocks would be recorded, not kept
        model = keyhole.load(config("llama"), init="random", device="cuda", **how)
        method = made(model, 1e-2, activations=activations)
        for step in range(4):
            method.step(batch(rows=2, length=6, seed=step))
        method.flush()
        found.append([model.home(tensor).clone() for tensor in model.layout.tensors])
    assert method.reverse.kept.first_kept(12) == 0
    assert all(map(torch.equal, *found))


def test_a_loss_that_is_not_finite_moves_nothing_and_counts_for_nothing() -> None:
    """Where the host does not wait for the loss, the device leaves weights alone, and the step is taken back."""
    model = keyhole.load(config("llama"), init="random", device="cuda", dtype="float32", seed=3)
    method = keyhole.LOMO(model, 1e-3, weight_decay=0.1)
    for step in range(4):
        method.step(batch(rows=2, length=6, seed=step))
    norm = next(t for t in model.layout.tensors if t.name.endswith("norm.weight") and t.block is None)
    before = [model.home(tensor).clone() for tensor in model.layout.tensors]
    model.home(norm).fill_(torch.inf)
    assert not torch.isfinite(method.step(batch(rows=2, length=6, seed=9)))
    assert method.step_count == 4
    for tensor, old in zip(model.layout.tensors, before, strict=True):
        assert tensor is norm or torch.equal(model.home(tensor), old)
    model.home(norm).copy_(before[model.layout.tensors.index(norm)])
    assert torch.isfinite(method.step(batch(rows=2, length=6, seed=9)))
    method.flush()
