"""Recorded blocks: the same bits as blocks that are launched kernel by kernel, for every method that has a reverse."""

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import pytest
import torch

import keyhole
from tests.matrix import in_every_run
from tests.model.decoders import batch, config

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations may be kept whatever else is on the GPU: other processes of these tests, for one."""
    monkeypatch.setattr("keyhole.model.backward.activation_store.SPARE", 0.0)


METHODS: dict[str, Callable[..., Any]] = {
    "lomo": lambda model, **how: keyhole.LOMO(model, 1e-2, **how),
    "lomo clipped": lambda model, **how: keyhole.LOMO(model, 1e-2, max_grad_norm=0.5, weight_decay=0.1, **how),
    "lomo each element": lambda model, **how: keyhole.LOMO(model, 1e-2, clip_value=1e-3, **how),
    "adalomo": lambda model, **how: keyhole.AdaLOMO(model, 1e-3, **how),
    "adam-offload": lambda model, **how: keyhole.AdamOffload(model, 1e-3, **how),
    "adam-offload clipped": lambda model, **how: keyhole.AdamOffload(model, 1e-3, max_grad_norm=0.5, **how),
    "lsp": lambda model, **how: keyhole.LSP(model, 1e-3, d=8, r=2, check_freq=5, **how),
    "lsp clipped": lambda model, **how: keyhole.LSP(model, 1e-3, d=8, r=2, learn=False, max_grad_norm=0.5, **how),
    "lomo-lora": lambda model, **how: keyhole.LOMOLoRA(model, 1e-2, r=2, **how),
    "lora": lambda model, **how: keyhole.LoRA(model, 1e-3, r=2, **how),
}
ALTERNATING = [(6, 9)[step % 2] for step in range(8)]
KEEPING = ["lomo", "lomo clipped", "adalomo", "adam-offload", "lsp", "lora"]
MIXED = [(9, 9)] * 3 + [(6, 6)] * 3 + [(9, 6)] * 3 + [(6, 9)] * 3 + [(12, 6)] * 3 + [(9, 12)] * 3 + [(6, 9)] * 2
"""Two micro-batches of each step, first recorded apart, and then mixed: passes that were recorded earlier are replayed
between the forward of a block and its reverse."""


def trained(
    name: str, graphs: bool, lengths: list[Any], micro_batches: int = 1, how: dict[str, Any] | None = None, **load: Any
) -> tuple[list[float], list[torch.Tensor], Any]:
    """Losses and weights after steps on batches of these lengths with a rate that changes, and the method."""
    model = keyhole.load(config("llama"), init="random", device="cuda", reverse_graphs=graphs, seed=3, **load)
    method, losses = METHODS[name](model, **how or {}), []
    for step, length in enumerate(lengths):
        method.lr = 1e-3 * (8 - step % 8) / 8
        each = length if isinstance(length, tuple) else [length] * micro_batches
        losses.append(float(method.step([batch(rows=2, length=n, seed=10 * step + i) for i, n in enumerate(each)])))
    method.flush()
    return losses, [t.detach().float().cpu() for t in model.module.state_dict().values()], method


def same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def kinds_of(method: Any) -> list[Any]:
    """Of what was recorded: the first part of a key, and of a reverse whether it reads kept activations."""
    found = [key for key, one in method.reverse.recorded.recordings.items() if key[0] != "update" and one is not None]
    return [key[0] if key[0] == "forward" else bool(key[-1]) for key in found]


@in_every_run(lambda dtype, micro_batches: (dtype == "float32") == (micro_batches == 2))
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "lora"])
def test_recorded_blocks_give_the_same_bits(name: str, dtype: str, micro_batches: int) -> None:
    """Losses and weights with recordings equal those without, and recordings were used."""
    how = {"activations": "block"}
    plain = trained(name, False, ALTERNATING, micro_batches, how, dtype=dtype)
    recorded = trained(name, True, ALTERNATING, micro_batches, how, dtype=dtype)
    assert same(plain, recorded) and plain[2].reverse.recorded is None
    assert {"forward", False} == set(kinds_of(recorded[2])), recorded[2].reverse.recorded.why


def within(name: str, budget: int | None) -> tuple[tuple[list[float], bytes], int, int, int]:
    """(losses, weights), recordings, the bytes of the planned step, and the largest number of bytes reserved."""
    work = keyhole.Workload(name.split()[0], tokens=2 * 9, passes=2, clips="clipped" in name)
    how = {"dtype": "bfloat16", "placement": "resident", "gpu_memory": budget, "workload": work}
    losses, weights, method = trained(name, True, ALTERNATING, 2, **how)
    found, reserved = method.reverse.recorded, torch.cuda.max_memory_reserved()
    count = 0 if found is None else sum(one is not None for one in found.recordings.values())
    planned = method.model.placed.device_bytes.total
    method.model.close()
    return (losses, torch.cat([w.flatten() for w in weights]).numpy().tobytes()), count, planned, reserved


def within_each(name: str, budgets: list[int]) -> list[tuple[tuple[list[float], bytes], int, int, int]]:
    """In a process of its own, because a budget counts all that the process holds; the tightest first, because the
    largest number of bytes is that since the process began."""
    return [within(name, budget) for budget in budgets]


@in_every_run(lambda name: name != "lomo")
@pytest.mark.parametrize("name", ["lomo", "lomo clipped", "adam-offload", "lsp"])
def test_a_budget_with_room_records_and_one_without_does_not(name: str) -> None:
    """The same bits in both, and as without a budget; both keep their budget. (16 MiB are less than cuBLAS takes for a
    stream on which graphs are captured.)"""
    expected, count, planned, _ = within(name, None)
    budgets = [planned + 2**24, 2**30]
    with get_context("spawn").Pool(1) as pool:
        (tight, eager, _, little), (roomy, recorded, _, reserved) = pool.apply(within_each, (name, budgets))
    assert recorded == count > 0 and eager == 0
    assert expected == roomy == tight
    assert little <= budgets[0] and reserved <= budgets[1]


@in_every_run(lambda name, micro_batches: (micro_batches == 2) == (name in ("lomo clipped", "lsp", "lora")))
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", KEEPING)
def test_recordings_that_keep_activations_give_the_same_bits(name: str, micro_batches: int) -> None:
    """Batches of two lengths that alternate, so that each length's activations must survive the other's steps, and of a
    third one later."""
    lengths = ALTERNATING + [6, 12] * 4
    plain = trained(name, False, lengths, micro_batches, {"activations": "block"}, dtype="bfloat16")
    recorded = trained(name, True, lengths, micro_batches, {"activations": "auto"}, dtype="bfloat16")
    assert same(plain, recorded)
    assert {"forward", True} == set(kinds_of(recorded[2])), recorded[2].reverse.recorded.why


@pytest.mark.parametrize("name", ["lomo", "lsp"])
def test_kept_activations_survive_passes_of_other_lengths(name: str) -> None:
    plain = trained(name, False, MIXED, how={"activations": "block"}, dtype="bfloat16")
    recorded = trained(name, True, MIXED, how={"activations": "auto"}, dtype="bfloat16")
    assert same(plain, recorded) and True in kinds_of(recorded[2])


@pytest.mark.parametrize(("name", "activations"), [("lomo clipped", "none"), ("lsp", "block")])
def test_recorded_compiled_blocks_give_the_same_bits(name: str, activations: str) -> None:
    """They are recorded from the function that runs otherwise, with its graph if activations are kept."""
    how = {"activations": activations, "compile": True}
    plain = trained(name, False, ALTERNATING, how=how, dtype="bfloat16")
    recorded = trained(name, True, ALTERNATING, how=how, dtype="bfloat16")
    assert same(plain, recorded) and plain[2].reverse.recorded is None
    assert {"forward", activations == "none"} == set(kinds_of(recorded[2])), recorded[2].reverse.recorded.why


@pytest.mark.parametrize("name", ["lomo", "adalomo", "lsp", "adam-offload"])
def test_recorded_blocks_of_a_streamed_model(name: str) -> None:
    """Slots are addresses too: streamed and recorded equals resident and not recorded."""
    streamed = trained(name, True, ALTERNATING, dtype="bfloat16", placement="stream")
    assert same(streamed, trained(name, False, ALTERNATING, dtype="bfloat16"))


@pytest.mark.parametrize("name", ["lomo", "adam-offload"])
def test_kept_activations_give_the_same_bits(name: str) -> None:
    """Blocks that keep their graphs, because they fit, and blocks that run twice."""
    # small blocks would be recorded, not kept
    plain, kept = (trained(name, False, [6] * 4, how={"activations": which}) for which in ("block", "auto"))
    assert kept[2].reverse.kept.first_kept(12) == 0 and same(plain, kept)


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
