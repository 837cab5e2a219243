"""A model that is dropped is freed at once, by reference counts: nothing waits for Python's collector."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import keyhole
from keyhole.methods import METHODS
from tests.matrix import in_every_run
from tests.model.decoders import batch, config

CASES = [
    pytest.param(name, placement, id=f"{name}-{placement}")
    for name, row in METHODS.items()
    for placement in (("resident", "stream") if row.streams else ("resident",))
]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without Python's collector: what reference counts do not free stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def load(name: str, decoder: str = "llama", placement: str = "resident") -> keyhole.Model:
    work = keyhole.Workload(method=name)
    return keyhole.load(config(decoder), init="random", device="cpu", placement=placement, workload=work)


def remains(model: list[keyhole.Model], name: str, **options: Any) -> list[str]:
    """Takes two steps, drops method and model, and names what is still there. (A list: the caller holds nothing.)"""
    threads = set(threading.enumerate())
    alive = {"model": weakref.ref(model[0]), "module": weakref.ref(model[0].module)}
    memory = {StorageWeakRef(home.untyped_storage()) for home in model[0].engine.homes}
    method = METHODS[name].load()(model[0], lr=1e-4, **options)
    for seed in range(2):
        method.step([batch(seed=seed), batch(seed=seed + 2)])
    model[0].nll(batch())
    model[0].generate(batch()["input_ids"], max_new_tokens=2)
    alive["method"] = weakref.ref(method)
    del method
    model.clear()
    left = [what for what, found in alive.items() if found() is not None]
    left += [thread.name for thread in set(threading.enumerate()) - threads]
    return left + ["memory"] * sum(not ref.expired() for ref in memory)


@in_every_run(lambda name, placement: placement == "stream" or not METHODS[name].streams or name in ("zo", "lomo"))
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("name", "placement"), CASES)
def test_with_every_method(name: str, placement: str) -> None:
    """After steps, an evaluation and a generation: model, module, method, threads and the weights' memory go with
    the last name."""
    if "lora" in name:
        pytest.importorskip("peft")
    assert remains([load(name, placement=placement)], name) == []


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("decoder", ["opt", "gpt2", "mixtral"])
def test_with_forwards_of_our_own(decoder: str) -> None:
    """Fused layers and other decoders are no reason to stay."""
    assert remains([load("zo", decoder)], "zo") == []


def test_a_dropped_model_leaves_its_module_as_it_was() -> None:
    """No hook and no forward of ours is left in it, and it computes as Hugging Face's does."""
    model = load("zo", "opt")
    module, inputs = model.module, batch()["input_ids"]
    patched = [m for m in module.modules() if "forward" in vars(m) or m._forward_pre_hooks]
    before = module(inputs).logits
    del model
    left = [m for m in module.modules() if "forward" in vars(m) or m._forward_pre_hooks]
    assert patched and left == [] and torch.equal(module(inputs).logits, before)
