"""Settings of the process: changed while somebody holds them, then as they were."""

import gc
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import keyhole
from keyhole.errors import UserError
from keyhole.machine import settings
from keyhole.machine.held import Changes, Setting
from keyhole.machine.settings import stream_warning
from keyhole.model.spare_memory import SpareMemory
from keyhole.model.structure import skeleton
from tests.model.decoders import batch, config
from tests.traced import IN_PLACE

ROOT = Path(__file__).parents[2]


class Knob:
    """A setting of a pretended process."""

    def __init__(self) -> None:
        self.value = "before"

    def setting(self) -> Setting:
        return Setting(lambda: self.value, lambda value: setattr(self, "value", value))


@given(st.permutations(range(4)), st.lists(st.sampled_from("ab"), min_size=4, max_size=4))
def test_holders_may_go_in_any_order(order: list[int], values: list[str]) -> None:
    """The newest holder's value counts; when all are gone, the value from before the first is back."""
    knob, holders = Knob(), [Changes() for _ in range(4)]
    setting = knob.setting()
    for holder, value in zip(holders, values, strict=True):
        holder.set(setting, value)
        assert knob.value == value
    left = list(range(4))
    for k in order:
        holders[k].close()
        holders[k].close()  # once is enough
        left.remove(k)
        assert knob.value == (values[left[-1]] if left else "before")


def test_what_was_there_when_a_model_came_is_put_back() -> None:
    """Also if it was somebody else's, set while an older model lived."""
    knob, old, new = Knob(), Changes(), Changes()
    setting = knob.setting()
    old.set(setting, 1)
    knob.value = "theirs"
    new.set(setting, 1)
    new.close()
    assert knob.value == "theirs"
    old.close()
    assert knob.value == "theirs"


def test_a_value_may_be_kept_rounded() -> None:
    """A share of memory is kept in bytes, and read a little smaller than it was set."""
    found, holder = [1.0], Changes()
    setting = Setting(lambda: int(found[0] * 1000) / 1000, lambda value: found.__setitem__(0, value))
    holder.set(setting, 1 / 3)
    assert found == [1 / 3]
    holder.close()
    assert found == [1.0]


def test_restoring_goes_on_after_an_error() -> None:
    """All others are as they were, the error is told, and a second call finds nothing left to do."""
    first, last, changes = Knob(), Knob(), Changes()
    changes.set(first.setting(), "ours")
    changes.callback(lambda: 1 / 0)
    changes.set(last.setting(), "ours")
    with pytest.raises(ZeroDivisionError):
        changes.close()
    changes.close()
    assert first.value == last.value == "before"


def test_two_threads_load_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each while the other one builds its module, in its own dtype; a third builds its own meanwhile."""
    never, real, own = threading.Event(), skeleton.auto_class, []

    def auto_class(config: object) -> Any:
        ThreadPoolExecutor(1).submit(lambda: own.append(torch.nn.Linear(4, 4))).result()
        never.wait(0.3)  # time for the other to come in, if it may
        return real(config)

    before = torch.nn.Module.register_parameter, torch.get_default_dtype(), torch.get_rng_state()
    monkeypatch.setattr(skeleton, "auto_class", auto_class)

    def load(dtype: str) -> torch.dtype:
        return keyhole.load(config("llama"), init="random", device="cpu", dtype=dtype).module.lm_head.weight.dtype

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(load, ["bfloat16", "float32"])) == [torch.bfloat16, torch.float32]
    assert before[:2] == (torch.nn.Module.register_parameter, torch.get_default_dtype())
    assert torch.equal(before[2], torch.get_rng_state())
    assert [layer.weight.device.type for layer in own] == ["cpu"] * 2


class Gpu:
    """A pretended one of 100 bytes, as far as its memory goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share, self.reserved, fake = 1.0, 0, monkeypatch.setattr
        fake(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
        fake(torch.cuda, "memory_reserved", lambda device: self.reserved)
        fake(torch.cuda, "empty_cache", lambda: None)
        fake(torch.cuda, "get_per_process_memory_fraction", lambda device: self.share)
        fake(torch.cuda, "set_per_process_memory_fraction", lambda share, device: setattr(self, "share", share))


def test_budgets_of_models_and_what_others_hold_are_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened and closed in any order. Without a budget there is no limit; what cannot be kept is refused with the
    numbers, and changes nothing."""
    gpu, models = Gpu(monkeypatch), [Changes() for _ in range(4)]
    limit = settings.MemoryLimit(torch.device("cuda", 0))
    gpu.reserved = 10  # the caller's
    for model, budget, expected in zip(models, (30, 20, None), (0.4, 0.6, 1.0), strict=False):
        limit.admit(model, budget)
        assert gpu.share == expected
        gpu.reserved = 10 + 15
    models[2].close()
    assert gpu.share == 0.6 and limit.left_bytes == 40
    with (
        models[3] as refused,
        pytest.raises(UserError, match="50B are the budgets.* 10B are held.* 40B are left"),
    ):
        limit.admit(refused, 41)
    assert gpu.share == 0.6 and limit.taken_bytes == 60
    models[0].close()
    assert gpu.share == 0.3
    spare = SpareMemory(SimpleNamespace(budget_bytes=20), torch.device("cuda", 0))  # type: ignore[arg-type]
    monkeypatch.setattr("keyhole.model.spare_memory.memory_limit", lambda device: limit)
    assert spare.reserved_bytes == 25 - 10
    models[1].close()
    assert gpu.share == 1.0 and limit.holders == {} and spare.reserved_bytes == 25


def test_all_that_is_changed_is_listed() -> None:
    """Each attribute of torch that a model holds has its row in docs/process.md."""
    page, held = (ROOT / "docs/process.md").read_text(), set()
    for path in (ROOT / "keyhole").rglob("*.py"):
        held |= set(re.findall(r'(?:attribute|compiler|in_this_thread)\([\w., "]*"(\w+)"[,)]', path.read_text()))
    assert len(held) >= 6 and [name for name in held if name not in page] == []


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_model_puts_back_the_precision_of_products(end: str) -> None:
    """Of two models that want different ones, in the order in which they go; and Hugging Face's progress bars are back
    as soon as a model is loaded."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    transformers.utils.logging.enable_progress_bar()
    try:
        exact = [keyhole.load(config("llama"), init="random", device="cpu")]
        fast = [keyhole.load(config("llama"), init="random", device="cpu", tf32=True)]
        assert torch.get_float32_matmul_precision() == "high"
        for models, left in ((fast, "highest"), (exact, "medium")):
            if end == "close":
                models[0].close()
            else:
                models.clear()
            assert torch.get_float32_matmul_precision() == left
        assert transformers.utils.logging.is_progress_bar_enabled()
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("tf32", [False, True])
def test_a_precision_that_was_set_by_backend_is_put_back(tf32: bool) -> None:
    """As TrainingArguments(tf32=True) does on a GPU; torch raises an error when it is asked for the one value, and so
    did loading."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        set_before = [backend.fp32_precision for backend in backends]
        model = keyhole.load(config("llama"), init="random", device="cpu", tf32=tf32)
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert {backend.fp32_precision for backend in backends} == {"tf32" if tf32 else "ieee"}
        model.close()
        assert [backend.fp32_precision for backend in backends] == set_before
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_model_that_fails_to_load_changes_nothing() -> None:
    """Neither the precision of products nor progress bars, whatever it was that failed."""
    transformers.utils.logging.enable_progress_bar()
    before = torch.get_float32_matmul_precision()
    with pytest.raises(UserError):
        keyhole.load(config("llama"), device="cpu", tf32=True)  # a config has no weights
    assert torch.get_float32_matmul_precision() == before and transformers.utils.logging.is_progress_bar_enabled()


def test_the_compilers_settings_go_with_the_model() -> None:
    """Those that compiled blocks need, forward and backward."""
    names = [("torch._dynamo", "recompile_limit"), ("torch._functorch", "donated_buffer")]

    def found() -> list[object]:
        return [settings.compiler(*name).read() for name in names]

    before = found()
    torch._dynamo.reset()  # shapes of other tests' models would be compiled as symbols: seconds
    try:
        for name, value in zip(names, (7, True), strict=True):
            settings.compiler(*name).write(value)
        model = keyhole.load(config("llama"), init="random", device="cpu")
        opt = keyhole.LOMO(model, 1e-3, compile=IN_PLACE)
        opt.step(batch())
        assert found() == [64, False]
        model.close()
        assert found() == [7, True]
    finally:
        for name, value in zip(names, before, strict=True):
            settings.compiler(*name).write(value)


@pytest.mark.parametrize("users", ["", "garbage_collection_threshold:0.8"])
def test_expandable_segments_are_put_back(users: str) -> None:
    """Beside what the user's own text says, for as long as one of two models lives."""
    said, change = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings
    before, ours = said(), f"{users},expandable_segments:True".strip(",")
    change(users)
    try:
        models = [Changes(), Changes()]
        for model in models:
            settings.expandable_segments(model)
            assert said() == ours
        models[0].close()
        assert said() == ours
        models[1].close()
        assert said() == users
        change("expandable_segments:False")  # what the user says of them counts
        settings.expandable_segments(models[0])
        assert said() == "expandable_segments:False"
    finally:
        change(before)


def test_autograds_warning_of_streams_is_put_back() -> None:
    """Off for recorded blocks that keep graphs, as long as their model is open."""
    setting, changes = stream_warning(), Changes()
    assert setting.read() is True
    changes.set(setting, False)
    assert setting.read() is False
    changes.close()
    assert setting.read() is True


@pytest.mark.gpu
def test_a_budget_goes_with_its_model() -> None:
    """The allocator's limit and expandable segments, while two models live and afterwards."""
    device = torch.device("cuda", torch.cuda.current_device())
    share, said = torch.cuda.get_per_process_memory_fraction, settings.allocator().read
    before, total = (share(device), said()), torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    models, held = [], torch.cuda.memory_reserved(device)
    for gib in (6, 5):  # tests before this one may hold some
        work = keyhole.Workload(method="lomo", tokens=64, passes=1)
        one = keyhole.load(config("llama"), init="random", gpu_memory=f"{gib}GiB", workload=work, device=device)
        keyhole.LOMO(one, 1e-3).step(batch())
        models.append(one)
        given = sum(range(gib, 7)) * 2**30 + held
        assert share(device) == pytest.approx(given / total)
        assert "expandable_segments" in said()
    del one
    models.pop().close()
    assert share(device) == pytest.approx((6 * 2**30 + held) / total)
    models.clear()
    gc.collect()
    assert share(device) == pytest.approx(before[0]) and said() == before[1]
    torch.ones(2**20, device=device).add_(1)  # the allocator still works


def test_a_torch_that_does_not_tell_its_allocator_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expandable segments go on beside the user's own text, and off again; the text of the environment counts."""
    written: list[str] = []
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", written.append, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    settings.allocator.cache_clear()
    try:
        changes = Changes()
        settings.expandable_segments(changes)
        assert written == ["max_split_size_mb:64,expandable_segments:True"]
        changes.close()
        assert written[-2:] == ["max_split_size_mb:64,expandable_segments:False", "max_split_size_mb:64"]
    finally:
        settings.allocator.cache_clear()
