"""What surrounds a recording, on a CPU: static memory, keys, growth, and what sinks note of a replay.

A CUDA graph is imitated by running its function again: on static memory, and with nothing that happens in Python
remembered. (That real graphs give the same bits: test_recorded.py.)
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch

import keyhole
from keyhole.methods.step_numbers import StepNumbers
from keyhole.model.backward.recorded import RecordedBlocks
from keyhole.model.backward.reverse import Reverse
from keyhole.model.backward.sink import RecordableSink
from keyhole.model.recorder import Recording, tensors_of
from keyhole.model.spare_memory import SpareMemory
from tests.matrix import in_every_run
from tests.model.decoders import batch, config
from tests.traced import IN_PLACE


class Graph(Recording):
    """Runs a function again; of what Python did then, the sink forgets everything. What it returned is overwritten by
    the next replay."""

    def __init__(self, recorded: "Imitated", run: Callable[[], Any]) -> None:
        super().__init__(self, None)
        self.recorded, self.run = recorded, run

    @torch.no_grad()
    def replay(self) -> Any:
        recorded, sink = self.recorded, self.recorded.owner.gradients.sink
        for tensor in recorded.left:
            tensor.fill_(torch.nan)
        mark = dict(sink.received) if isinstance(sink, RecordableSink) else None
        result = self.run()
        self.result = result if self.result is None else self.result
        for mine, new in zip(tensors_of(self.result), tensors_of(result), strict=True):
            mine.data.copy_(new)  # the same tensors in every replay, whose versions stay
        if mark is not None:
            sink.received = mark
        shared = [one.data for one in tensors_of(self.result) if one.data_ptr() not in {*recorded.fixed, *recorded.at}]
        recorded.left = [] if self.kept else shared
        recorded.replays += 1
        return self.result


class Imitated(RecordedBlocks):
    """Recordings without a GPU."""

    def __init__(self, method: Any, keeps: bool) -> None:
        reverse: Reverse = method.reverse
        how = (reverse.recompute, SpareMemory(None, torch.device("cpu")))
        room: Any = Room() if keeps else None
        super().__init__(method.model, reverse.units_of, reverse.gradients, *how, room)
        self.owner = reverse
        self.kept_in: dict[int, list[tuple[Any, int]]] = {}  # by pool: pass and shape, block
        self.alive: list[Any] = []  # pools, so that no two have one id
        self.left: list[torch.Tensor] = []  # results of the last replay
        self.replays = 0

    def new_pool(self) -> Any:
        return object()

    def _kept_pool(self, of: Any, block: int) -> Any:
        pool = super()._kept_pool(of, block)
        self.kept_in.setdefault(id(pool), []).append((of, block))
        self.alive.append(pool)
        return pool

    def capture(self, run: Callable[[], Any], pool: Any = None, kind: str = "") -> Any:
        return Graph(self, run)


class Room:
    """Memory without end."""

    def has_room(self, tokens: int) -> bool:
        return True


def recording(method: Any, imitated: type[Imitated] = Imitated, keeps: bool = False) -> Imitated:
    """Has a method on a CPU record what it would record on a GPU. keeps: with its activations."""
    recorded = method.reverse.recorded = imitated(method, keeps)
    if isinstance(method, keyhole.LOMO):
        method.reads = method.waits
        method.update.numbers = None if method.waits else StepNumbers(method.model.device)
    if isinstance(method, keyhole.LSP):
        method.updates.recorded, method.updates.numbers = recorded, StepNumbers(method.model.device)
    return recorded


METHODS: dict[str, Callable[[Any], Any]] = {
    "lomo": lambda model: keyhole.LOMO(model, weight_decay=0.1),
    "lomo clipped": lambda model: keyhole.LOMO(model, max_grad_norm=0.5),
    "adalomo": lambda model: keyhole.AdaLOMO(model),
    "adam-offload": lambda model: keyhole.AdamOffload(model, gpu_updates=False),
    "lsp": lambda model: keyhole.LSP(model, d=8, r=2, check_freq=3, optimizer_on="gpu"),
    "lsp clipped": lambda model: keyhole.LSP(model, d=8, r=2, learn=False, max_grad_norm=0.5, optimizer_on="gpu"),
    "lomo-lora": lambda model: keyhole.LOMOLoRA(model, r=2),
    "lora": lambda model: keyhole.LoRA(model, r=2, activations="block"),
    "lora int4": lambda model: keyhole.LoRA(model, r=2, activations="block"),
}


ACCUMULATED = ("lomo clipped", "lora")  # in `make test`; the others are recorded with one micro-batch
ALIKE = ("lomo-lora", "lsp clipped")  # what they record, others do


def trained(
    name: str, records: bool, micro_batches: int, keeps: bool = False, lengths: tuple[int, int] = (6, 9)
) -> tuple[list[float], list[torch.Tensor], Any]:
    """Losses, weights and the recorder after steps on batches of two lengths, with a rate that changes."""
    wire = "int4" if "int4" in name else None
    model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float32", seed=3, wire=wire)
    method, losses = METHODS[name](model), []
    recorded = recording(method, keeps=keeps) if records else None
    for step in range(6):
        method.lr = 1e-2 * (8 - step) / 8
        batches = [batch(rows=2, length=lengths[step % 2], seed=10 * step + i) for i in range(micro_batches)]
        losses.append(float(method.step(batches)))
    method.flush()
    weights = [model.home(tensor).clone() for tensor in model.layout.tensors]
    model.close()  # an imitated recording holds the method, so nothing else would undo what compiling has set
    return losses, weights, recorded


@lru_cache
def unrecorded(name: str, micro_batches: int) -> tuple[list[float], list[torch.Tensor], Any]:
    """What recordings of a method are compared with; twice, where activations are kept too."""
    return trained(name, False, micro_batches)


def in_make_test(name: str, micro_batches: int, keeps: bool) -> bool:
    if keeps:
        return name == ("lomo clipped" if micro_batches == 2 else "lsp")
    return (micro_batches == 2) == (name in ACCUMULATED) and name not in ALIKE


@in_every_run(in_make_test)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_replays_give_the_same_bits(name: str, micro_batches: int, keeps: bool) -> None:
    """Batches of two lengths, that take turns. keeps: the reverse recomputes nothing."""
    losses, weights, recorded = trained(name, True, micro_batches, keeps)
    plain = unrecorded(name, micro_batches)
    reverses = [bool(key[-1]) for key in recorded.recordings if key[0] == "reverse"]
    assert recorded.replays > 10 and reverses and all(kept == keeps for kept in reverses)
    assert all(one is not None for one in recorded.recordings.values())
    assert losses == plain[0]
    assert all(map(torch.equal, weights, plain[1]))


COMPILED: dict[str, Callable[[Any], Any]] = {
    "lomo": lambda model: keyhole.LOMO(model, weight_decay=0.1, compile=IN_PLACE),
    "lomo, all kept": lambda model: keyhole.LOMO(model, max_grad_norm=0.5, compile=IN_PLACE, activations="none"),
    "lsp": lambda model: keyhole.LSP(model, d=8, r=2, check_freq=3, optimizer_on="gpu", compile=IN_PLACE),
    "adalomo, all kept": lambda model: keyhole.AdaLOMO(model, compile=IN_PLACE, activations="none"),
}


@in_every_run(lambda name: name == "lomo, all kept")
@pytest.mark.parametrize("name", COMPILED)
def test_replays_of_compiled_blocks_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are recorded from the compiled function that runs otherwise."""
    torch._dynamo.reset()
    monkeypatch.setitem(METHODS, name, COMPILED[name])
    keeps = "all kept" in name
    same = (6, 6)  # another length would be compiled too
    losses, weights, recorded = trained(name, True, 1, keeps=keeps, lengths=same)
    plain = trained(name, False, 1, lengths=same)
    kinds = [key for key in recorded.recordings if key[0] != "update"]
    assert recorded.replays > 10 and all(one is not None for one in recorded.recordings.values())
    assert all(bool(kind[-1]) == keeps for kind in kinds if kind[0] == "reverse")
    assert losses == plain[0] and all(map(torch.equal, weights, plain[1]))


def test_kept_activations_share_a_pool_with_later_blocks_of_their_pass_alone() -> None:
    """Elsewhere a graph that is replayed between their forward and their reverse might have a temporary in their place:
    an update, or the pass of another micro-batch whose length was recorded in an earlier step."""
    model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float32", seed=3)
    method = keyhole.LOMO(model)
    recorded, step = recording(method, keeps=True), 0
    for lengths in ((9, 9), (9, 6), (6, 9), (6, 6)):
        for _ in range(3):
            method.step([batch(rows=2, length=length, seed=10 * step + i) for i, length in enumerate(lengths)])
            step += 1
    found = list(recorded.kept_in.values())
    assert len(found) >= 4  # two passes of two lengths each
    for visits in found:
        assert len({of for of, _ in visits}) == 1
        assert [block for _, block in visits] == sorted({block for _, block in visits})


def test_a_block_that_is_used_twice_in_a_pass_is_not_recorded() -> None:
    """Its second output would lie where the first one waits for the reverse."""
    found = []
    for records in (False, True):
        model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float32", seed=3)
        layers = model.module.model.layers
        layers[-1].forward = lambda x, first=layers[0], **more: first.forward(x, **more)
        method = keyhole.LOMO(model)
        recorded = recording(method) if records else None
        losses = [float(method.step(batch(rows=2, length=6, seed=step))) for step in range(4)]
        found.append((losses, [model.home(tensor).clone() for tensor in model.layout.tensors]))
    assert not any(key[0] in ("forward", "reverse") for key in recorded.recordings)
    assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))


@in_every_run(lambda name: name != "adalomo")
@pytest.mark.parametrize("name", ["lomo", "adalomo", "lsp"])
def test_what_a_user_freezes_is_not_trained_by_a_replay(name: str) -> None:
    """A matrix and norms, frozen between steps and trained again later: as without recordings."""
    found = []
    for records in (False, True):
        model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float32", seed=3)
        layers = model.module.model.layers
        frozen = [layers[0].mlp.up_proj.weight, *(layer.input_layernorm.weight for layer in layers)]
        method = METHODS[name](model)
        recorded = recording(method, keeps=True) if records else None
        method.lr, kept = 1e-2, []
        for step in range(9):
            for param in frozen:
                param.requires_grad_(not 3 <= step < 6)
            method.step(batch(rows=2, length=6, seed=step))
            if step in (2, 5):
                method.flush()
                kept.append([param.detach().clone() for param in frozen])
        method.flush()
        assert all(map(torch.equal, *kept))
        found.append([model.home(tensor).clone() for tensor in model.layout.tensors])
    assert recorded.replays > 10 and all(map(torch.equal, *found))


class Failing(Imitated):
    """Recording fails in the middle of every reverse; `capturing` while it is tried."""

    reverses = capturing = False
    failures = 0

    def reverse(self, *args: Any) -> Any:
        self.reverses = True
        try:
            return super().reverse(*args)
        finally:
            self.reverses = False

    def capture(self, run: Callable[[], Any], pool: Any = None, kind: str = "") -> Any:
        if not self.reverses:
            return super().capture(run, pool)
        self.capturing = True
        try:
            with pytest.raises(RuntimeError, match="capturing"):
                run()
        finally:
            self.capturing = False
        self.failures += 1
        return None


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", ["lomo", "lsp"])
def test_a_recording_that_fails_in_the_middle_loses_no_gradient(name: str, keeps: bool) -> None:
    """A model that reads a number on the host cannot be recorded: its step is the ordinary one all the same. A block
    whose graph was kept is recomputed from then on."""
    found = []
    for records in (False, True):
        model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float32", seed=3)
        method = METHODS[name](model)
        recorded = recording(method, Failing, keeps) if records else None

        def refuse(module: Any, grads: Any, recorded: Any = recorded) -> None:
            if recorded is not None and recorded.capturing:
                raise RuntimeError("operation not permitted when stream is capturing")

        refuse.__module__ = "keyhole.tests"  # a part of the model, and no hook of a user's
        for layer in model.module.model.layers:
            layer.self_attn.o_proj.register_full_backward_pre_hook(refuse)
        losses = [float(method.step(batch(rows=2, length=6, seed=step))) for step in range(5)]
        found.append((losses, [model.home(tensor).clone() for tensor in model.layout.tensors]))
    assert recorded.failures >= len(model.module.model.layers)
    assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))


def test_a_full_table_of_recordings_is_still_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more are made, and those that exist are replayed."""
    monkeypatch.setattr("keyhole.model.backward.recorded.MOST_GRAPHS", 5)
    model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float32", seed=3)
    method = keyhole.LOMO(model)
    recorded, replays = recording(method), []
    for step in range(6):
        method.step(batch(rows=2, length=6, seed=step))
        replays.append(recorded.replays)
    assert len(recorded.recordings) == 5
    assert replays[-1] - replays[-2] == 5


def test_gradients_of_adjacent_matrices_go_to_the_host_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of a Llama has seven matrices in one unit; its vectors are apart."""
    model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float32", seed=3)
    method = keyhole.AdamOffload(model, gpu_updates=False)
    recording(method)
    put, sizes = method.exchange.put, []
    monkeypatch.setattr(method.exchange, "put", lambda *one: (sizes.append(one[2].numel()), put(*one)))
    for step in range(3):
        sizes.clear()
        method.step(batch(rows=2, length=6, seed=step))
    method.flush()
    blocks = model.layout.of_kind("block")
    matrices = [sum(t.shape.numel() for t in unit.tensors) for unit in reversed(blocks)]
    assert [size for size in sizes if size in matrices] == matrices


def test_a_loss_that_is_not_finite_counts_for_nothing() -> None:
    """Where the host does not wait for the loss, gradients become nan, no weight moves, and the step is taken back."""
    model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float32", seed=3)
    method = keyhole.AdaLOMO(model, weight_decay=0.1)
    recording(method)
    for step in range(3):
        method.step(batch(rows=2, length=6, seed=step))
    norm = next(t for t in model.layout.tensors if t.name.endswith("norm.weight") and t.block is None)
    before = {tensor.name: model.home(tensor).clone() for tensor in model.layout.tensors}
    model.home(norm).fill_(torch.inf)
    assert not torch.isfinite(method.step(batch(rows=2, length=6, seed=9)))
    model.home(norm).copy_(before[norm.name])
    assert method.step_count == 3
    assert all(torch.equal(model.home(tensor), before[tensor.name]) for tensor in model.layout.tensors)
    assert torch.isfinite(method.step(batch(rows=2, length=6, seed=9)))
    method.flush()


def test_a_block_with_a_hook_of_the_user_s_is_not_replayed() -> None:
    """From the next step on, until the hook is removed; the others are. The bits are the same."""
    found, replays = [], []
    for records in (False, True):
        model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float32", seed=3)
        method, calls = METHODS["lomo"](model), []
        recorded = recording(method, keeps=True) if records else None
        for step in range(9):
            if step == 3:
                layer = model.module.model.layers[0].mlp
                handle = layer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            if step == 6:
                handle.remove()
            before = recorded.replays if records else 0
            method.step(batch(rows=2, length=6, seed=step))
            replays += [recorded.replays - before] if records else []
        found.append(([model.home(tensor).clone() for tensor in model.layout.tensors], len(calls)))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1] == 6, "both runs of a block that is recomputed"
    assert 0 < max(replays[3:6]) < replays[8]
