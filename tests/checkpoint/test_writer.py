"""Snapshots taken while training goes on are the checkpoints that training would have waited for."""

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import keyhole
from keyhole.checkpoint import snapshot as snapshots
from keyhole.checkpoint.snapshot import READY, WAITING, Segment, Snapshot, Source
from keyhole.checkpoint.state import STATE, State, verify
from keyhole.checkpoint.writer import Writer
from keyhole.errors import NonFinite
from keyhole.methods import METHODS
from keyhole.model.structure import find
from keyhole.plan import fit as units_fit
from tests.matrix import in_every_run
from tests.model.decoders import config

ABOUT = State(3, {"epoch": 0}, config={"seed": 1}, versions={"torch": "2"})
STREAMING = {"zo", "lomo", "adalomo"}
ADAPTERS = {"lora", "lomo-lora"}  # adapters beside the model: saved by waiting
CASES = [(method, "resident", "float32") for method in METHODS if method not in ADAPTERS]
CASES += [(method, "stream", "bfloat16") for method in METHODS if method in STREAMING]
CASES += [("zo", "resident", "bfloat16"), ("zo", "stream", "fp8")]
SHARED = [(name, "resident") for name in ("sgd", "lomo", "adalomo", "galore")]  # the same code as others' cases


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 200, (2, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


rows = batch


def make(tiny_model: Path, method: str, placement: str, dtype: str, device: str = "cpu") -> tuple[keyhole.Model, Any]:
    how = {"dtype": "bfloat16", "wire": "fp8"} if dtype == "fp8" else {"dtype": dtype}
    how |= {"chaos": random.Random(7)} if placement == "stream" else {}
    model = keyhole.load(tiny_model, device=device, placement=placement, workload=keyhole.Workload(method), **how)
    return model, METHODS[method].load()(model, 1e-3)


def begun(
    tiny_model: Path, path: Path, pool_bytes: int | None = None, placement: str = "resident", **how: Any
) -> tuple[Writer, Any]:
    """A run of zo after one step, and a checkpoint of it that has begun."""
    model, opt = make(tiny_model, "zo", placement, "float32")
    background = Writer(model, opt, pool_bytes)
    opt.step(batch(0))
    background.begin(path, ABOUT, **how)
    return background, opt


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    real = snapshots.write_at

    def write(*args: Any) -> None:
        time.sleep(0.003)
        real(*args)

    monkeypatch.setattr(snapshots, "write_at", write)


NO_POOL = [case for case in CASES if case[0] in ("zo", "adamw", "adam-offload")]


BESIDE = [("zo", "stream"), ("adamw", "resident")]  # in `make test`, without a pool


@in_every_run(
    lambda method, placement, pool: ((method, placement) in (SHARED if pool == "half" else BESIDE)) == (pool == "none")
)
@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize(
    ("method", "placement", "dtype", "pool"), [(*c, "half") for c in CASES] + [(*c, "none") for c in NO_POOL]
)
def test_a_snapshot_is_the_save_bit_for_bit(
    tiny_model: Path, tmp_path: Path, method: str, placement: str, dtype: str, pool: str
) -> None:
    """Two steps, a snapshot, two more steps meanwhile: the files of a run that stopped and saved after two."""
    compare(tiny_model, tmp_path, (method, placement, dtype, "cpu"), None if pool == "half" else 0)


@pytest.mark.parametrize("method", ["zo", "lomo"])
def test_a_snapshot_of_experts_that_nobody_met(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts as units, of which two tokens meet a few: those that still lack updates come home for the snapshot."""
    monkeypatch.setattr(find, "STACK_NUMEL", 0)
    monkeypatch.setattr(units_fit, "UNIT_BYTES", 4)
    keyhole.load(config("gpt_oss", num_local_experts=8), init="random", device="cpu").save_pretrained(
        tmp_path / "model"
    )
    assert make(tmp_path / "model", method, "stream", "float32")[0].layout.has_expert_units
    monkeypatch.setattr(f"{__name__}.batch", lambda step: {k: v[:1, :2] % 90 for k, v in rows(step).items()})
    compare(tmp_path / "model", tmp_path, (method, "stream", "float32", "cpu"), None)


@pytest.mark.gpu
@pytest.mark.usefixtures("slow_disk")
@in_every_run(lambda method, pool: pool == "half" or method == "zo")
@pytest.mark.parametrize(("method", "placement", "dtype"), CASES)
@pytest.mark.parametrize("pool", ["half", "none"])
def test_the_same_on_a_gpu(
    tiny_model: Path, tmp_path: Path, method: str, placement: str, dtype: str, pool: str
) -> None:
    compare(tiny_model, tmp_path, (method, placement, dtype, "cuda"), None if pool == "half" else 0)


def compare(tiny_model: Path, tmp_path: Path, how: tuple[str, ...], pool_bytes: int | None) -> None:
    model, opt = make(tiny_model, *how)
    background = Writer(model, opt, pool_bytes)
    for step in range(2):
        opt.step(batch(step))
    background.begin(tmp_path / "background", ABOUT)
    for step in range(2, 4):
        opt.step(batch(step))
    done = background.wait()
    assert done.error is None and model.engine.watch is None
    assert done.snapshot.peak_bytes <= background.pool_bytes and done.snapshot.copied_bytes == 0
    reference, waits = make(tiny_model, *how)
    for step in range(2):
        waits.step(batch(step))
    waits.flush()
    waiting = Writer(reference, waits, pool_bytes)
    waiting.begin(tmp_path / "waited", ABOUT, waits=True)
    assert waiting.wait().error is None
    ours, theirs = contents(tmp_path / "background"), contents(tmp_path / "waited")
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if ours[n] != theirs[n] and n != STATE] == []
    states = [verify(tmp_path / name) for name in ("background", "waited")]
    states[1].method.pop("changed", None)  # of zo, without a flush
    assert states[0].method == states[1].method
    saved = load_file(tmp_path / "waited" / "model.safetensors")
    assert all(torch.equal(t.cpu(), saved[name]) for name, t in reference.named_tensors() if name in saved)
    for step in range(2, 4):  # and the run itself went on undisturbed
        waits.step(batch(step))
    opt.flush()
    waits.flush()
    mine = dict(model.named_tensors())
    assert all(torch.equal(tensor, mine[name]) for name, tensor in reference.named_tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), -float("nan")])
def test_numbers_that_are_not_finite_are_seen(dtype: torch.dtype, bad: float) -> None:
    top = torch.finfo(dtype).max
    fine = torch.tensor([0.0, -0.0, 1.0, -top, top, torch.finfo(dtype).tiny / 2], dtype=dtype)
    snapshots.check_finite(fine, "w")
    with pytest.raises(NonFinite, match="w holds"):
        snapshots.check_finite(torch.cat([fine, torch.tensor([bad], dtype=dtype)]), "w")


class Halts(threading.Condition):
    """A condition that says when a thread is about to wait in it for something that is not so (workers do not ask)."""

    def __init__(self) -> None:
        super().__init__()
        self.halted = threading.Event()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if not predicate():
            self.halted.set()  # under the lock: nothing changes before the wait
        return super().wait_for(predicate, timeout)


def test_memory_is_at_most_half_of_the_weights(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt = make(tiny_model, "zo", "stream", "bfloat16")
    background = Writer(model, opt)
    weights = sum(home.numel() * home.element_size() for home in model.engine.homes)
    assert background.pool_bytes == weights // 2
    go, made, take, init = threading.Event(), [], Snapshot._take, Snapshot.__init__

    def watched(snapshot: Snapshot, *args: Any) -> None:
        init(snapshot, *args)
        snapshot.turn = Halts()
        made.append(snapshot)

    monkeypatch.setattr(Snapshot, "__init__", watched)
    monkeypatch.setattr(Snapshot, "_take", lambda snapshot: go.wait(60) and take(snapshot))
    opt.step(batch(0))
    background.begin(tmp_path / "c", ABOUT)
    (snapshot,), stepped = made, []

    def steps() -> None:
        for step in (1, 2):
            opt.step(batch(step))
            stepped.append(step)
        snapshot.turn.halted.set()  # not before it should: the assertion below sees it

    stepping = threading.Thread(target=steps)
    stepping.start()
    assert snapshot.turn.halted.wait(60)
    assert stepped != [1, 2] and 0 < snapshot.peak_bytes <= weights // 2
    go.set()
    stepping.join()
    done = background.wait()
    assert stepped == [1, 2] and done.error is None and snapshot.peak_bytes <= weights // 2
    verify(tmp_path / "c")


def one_page(state: int = READY, pool_bytes: int = 100) -> tuple[Snapshot, Source]:
    source = Source(torch.arange(4.0), [Segment("w", 0, 4, "f", 0)], state=state)
    return Snapshot({0: source}, [], pool_bytes, torch.device("cpu")), source


def read(path: Path) -> list[float]:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).tolist()


def test_copy_on_write(tmp_path: Path) -> None:
    snapshot, source = one_page()
    (tmp_path / "f").write_bytes(bytes(16))
    snapshot.before_change(0)
    source.flat.fill_(9.0)
    snapshot.changed(0, None)
    snapshot.write(tmp_path)
    assert read(tmp_path / "f") == [0, 1, 2, 3]
    snapshot, source = one_page(WAITING)
    assert not snapshot.is_whole
    snapshot.before_change(0)
    source.flat.fill_(9.0)
    snapshot.changed(0, None)
    assert snapshot.is_whole
    snapshot.before_change(0)
    source.flat.fill_(7.0)
    snapshot.write(tmp_path)
    assert read(tmp_path / "f") == [9, 9, 9, 9] and snapshot.copied_bytes == 0


def test_training_waits_for_a_page_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither copied nor changed before it is on its way to the disk; the page that changes last goes first."""
    sources = [Source(torch.full((2,), float(i)), [Segment("w", 0, 2, "f", 8 * i)]) for i in range(3)]
    snapshot = Snapshot(dict(enumerate(sources)), [], 100, torch.device("cpu"))
    snapshot.turn = Halts()
    (tmp_path / "f").write_bytes(bytes(24))
    real, go, order = snapshots.write_at, threading.Event(), []

    def steered(file: int, data: memoryview, offset: int) -> None:
        order.append(offset // 8)
        assert go.wait(20)
        real(file, data, offset)

    def change() -> None:
        for page, source in enumerate(sources):
            snapshot.before_change(page)
            source.flat.fill_(9.0)

    monkeypatch.setattr(snapshots, "write_at", steered)
    monkeypatch.setattr(snapshots, "WORKERS", 1)
    writing, changing = threading.Thread(target=snapshot.write, args=(tmp_path,)), threading.Thread(target=change)
    writing.start()
    while not order:
        time.sleep(0.001)
    changing.start()
    assert snapshot.turn.halted.wait(20)
    assert [source.flat[0] for source in sources] == [9, 9, 2]
    go.set()
    for thread in (changing, writing):
        thread.join()
    assert order == [2, 0, 1] and read(tmp_path / "f") == [0, 0, 1, 1, 2, 2] and snapshot.copied_bytes == 0


FAULTS: dict[str, tuple[Any, str, BaseException]] = {
    "a full disk": (snapshots, "write_at", OSError(28, "No space left on device")),
    "a bug": (snapshots, "write_at", RuntimeError("a bug")),
    "a disk that cannot be flushed": (os, "fdatasync", OSError(5, "Input/output error")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_lets_training_go_on(
    fault: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever breaks in a worker, nobody waits for it, nothing is left on disk, and the error is handed over. What the
    kernel took and could not put on the disk is known before the checkpoint gets its name."""
    place, name, error = FAULTS[fault]
    failed, write_at = threading.Event(), snapshots.write_at

    def fail(*args: Any) -> None:
        failed.set()
        raise error

    if place is os:  # writers of so little might be done before anything is flushed
        monkeypatch.setattr(snapshots, "write_at", lambda *args: failed.wait(20) and write_at(*args))
    monkeypatch.setattr(place, name, fail)
    background, opt = begun(tiny_model, tmp_path / "checkpoint-1", 0)
    stepping = threading.Thread(target=lambda: [opt.step(batch(step)) for step in (1, 2, 3)], daemon=True)
    stepping.start()
    stepping.join(20)
    assert not stepping.is_alive()
    assert background.wait().error is error and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), RuntimeError("a bug")])
def test_a_copy_that_cannot_be_made(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Without memory for it training goes on and the checkpoint does not; nobody waits for the copy."""

    def fail(size_bytes: int) -> None:
        raise error

    (background, opt), go = begun(tiny_model, tmp_path / "checkpoint-1"), threading.Event()
    snapshot = background.writing.snapshot
    real, snapshot._take = snapshot._take, lambda: go.wait() and real()
    opt.step(batch(1))
    monkeypatch.setattr(snapshots.arena, "host_memory", fail)
    if isinstance(error, OSError):
        opt.step(batch(2))
    else:
        with pytest.raises(RuntimeError, match="a bug"):
            opt.step(batch(2))
    go.set()
    ending = threading.Thread(target=background.abandon, daemon=True)
    ending.start()
    ending.join(20)
    assert not ending.is_alive() and snapshot.error is error and list(tmp_path.iterdir()) == []


def test_broken_weights_are_not_saved(tiny_model: Path, tmp_path: Path) -> None:
    model, opt = make(tiny_model, "sgd", "resident", "float32")
    background = Writer(model, opt)
    model.home(model.layout.table)[3, 3] = float("nan")
    background.begin(tmp_path / "checkpoint-1", ABOUT)
    error = background.wait().error
    assert isinstance(error, NonFinite) and "embed_tokens.weight holds NaN" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_training_that_ends_early_cancels(tiny_model: Path, tmp_path: Path) -> None:
    """Weights that still wait for their update are not waited for when no step will come."""
    background, _ = begun(tiny_model, tmp_path / "a", placement="stream")
    background.abandon()
    assert list(tmp_path.iterdir()) == []
    background.begin(tmp_path / "b", ABOUT)
    assert background.wait().error is None and verify(tmp_path / "b")  # waiting flushes


def test_without_the_journal_there_is_no_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    error = OSError("the journal has no record of step 3")

    def refuse() -> None:
        raise error

    background, _ = begun(tiny_model, tmp_path / "a", before_rename=refuse)
    assert background.wait().error is error and list(tmp_path.iterdir()) == []


def test_added_weights_are_waited_for(tiny_model: Path) -> None:
    """LoRA's merged weights exist nowhere in memory: such a model is saved by waiting."""
    pytest.importorskip("peft")
    model = keyhole.load(tiny_model, device="cpu")
    assert Writer(model, METHODS["lora"].load()(model, 1e-3)).waits
