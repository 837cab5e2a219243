"""Settings of the process: changed while somebody holds them, then as they were."""

import gc

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import keyhole
from keyhole.errors import UserError
from keyhole.machine import settings
from keyhole.machine.settings import Changes, Setting, stream_warning
from tests.model.decoders import batch, config
from tests.traced import IN_PLACE


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
        holders[k].put_back()
        holders[k].put_back()  # once is enough
        left.remove(k)
        assert knob.value == (values[left[-1]] if left else "before")


def test_what_was_there_when_a_model_came_is_put_back() -> None:
    """Also if it was somebody else's, set while an older model lived."""
    knob, old, new = Knob(), Changes(), Changes()
    setting = knob.setting()
    old.set(setting, 1)
    knob.value = "theirs"
    new.set(setting, 1)
    new.put_back()
    assert knob.value == "theirs"
    old.put_back()
    assert knob.value == "theirs"


def test_a_value_may_be_kept_rounded() -> None:
    """A share of memory is kept in bytes, and read a little smaller than it was set."""
    found, holder = [1.0], Changes()
    setting = Setting(lambda: int(found[0] * 1000) / 1000, lambda value: found.__setitem__(0, value))
    holder.set(setting, 1 / 3)
    assert found == [1 / 3]
    holder.put_back()
    assert found == [1.0]


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
        models[0].put_back()
        assert said() == ours
        models[1].put_back()
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
    changes.put_back()
    assert setting.read() is True


@pytest.mark.gpu
def test_a_budget_goes_with_its_model() -> None:
    """The allocator's limit and expandable segments, while two models live and afterwards."""
    device = torch.device("cuda", torch.cuda.current_device())
    share, said = torch.cuda.get_per_process_memory_fraction, settings.allocator().read
    before, total = (share(device), said()), torch.cuda.get_device_properties(device).total_memory
    models = []
    for gib in (6, 5):  # tests before this one may hold some
        work = keyhole.Workload(method="lomo", tokens=64, passes=1)
        one = keyhole.load(config("llama"), init="random", gpu_memory=f"{gib}GiB", workload=work, device=device)
        keyhole.LOMO(one, 1e-3).step(batch())
        models.append(one)
        assert share(device) == pytest.approx(gib * 2**30 / total)
        assert "expandable_segments" in said()
    del one
    models.pop().close()
    assert share(device) == pytest.approx(6 * 2**30 / total)
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
        changes = settings.Changes()
        settings.expandable_segments(changes)
        assert written == ["max_split_size_mb:64,expandable_segments:True"]
        changes.put_back()
        assert written[-2:] == ["max_split_size_mb:64,expandable_segments:False", "max_split_size_mb:64"]
    finally:
        settings.allocator.cache_clear()
