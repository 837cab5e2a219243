"""LOMO and AdaLOMO give the same bits wherever weights and activations are: streamed, cut, kept, redone, compiled."""

from functools import partial

import pytest
import torch

from keyhole.methods.lomo.adalomo import AdaLOMO
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.workload import Workload
from keyhole.plan import fit
from tests.matrix import in_every_run
from tests.methods.lomo.loops import SIX, close, load, micro_batches, torch_sgd, train, weights
from tests.model.decoders import LAYERS, NAMES, UNLIKE
from tests.model.streaming import assert_trained_alike, streamed, under_random_delays
from tests.traced import IN_PLACE

FEW = ("gpt2", "qwen2", "mixtral", *UNLIKE)  # transposed, tied, with experts; and those unlike the six


@in_every_run(lambda name, method: name in FEW if method is LOMO else name == "mixtral")
@pytest.mark.parametrize(("name", "method"), [(n, LOMO) for n in NAMES] + [(n, AdaLOMO) for n in SIX])
def test_streamed_equals_resident(name: str, method: type) -> None:
    """Losses and weights, to the bit, with the exact norm; in six families with two micro-batches."""
    resident = load(name)
    steps = [micro_batches(t, 2 if name in SIX else 1) for t in range(2)]
    models = resident, streamed(resident, slot_count=2)
    assert_trained_alike(models, lambda model: method(model, 0.05, max_grad_norm=0.7), steps)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "wire": "fp32"}])
def test_blocks_cut_into_several_units(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Units smaller than a block, also with homes in another dtype: the same bits."""
    monkeypatch.setattr(fit, "UNIT_BYTES", 16384)
    found = []
    for where in ({}, {"placement": "stream"}):
        model = load("llama", workload=Workload(method="lomo", tokens=20, passes=1), **options, **where)
        train(LOMO(model), 3)
        found.append(weights(model))
    assert len(model.layout.of_kind("block")) > model.layout.block_count and model.engine.slot_count > 3
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("name", ["llama", "opt", "phi3"])
def test_parts_of_blocks_cross_the_link_twice_at_most(name: str) -> None:
    """From the first step on if a block uses its matrices in the order in which it lists them (llama), else from the
    second."""
    model = streamed(load(name), max_unit_numel=1, slot_count=8)
    size, opt = sum(model.engine.homes[page].nbytes for page in model.engine.streamed), LOMO(model, 0.05)
    for step in range(3):
        before = model.engine.bytes_up
        opt.step(micro_batches(step, 2))
        assert model.engine.bytes_up - before <= 2 * size or (step == 0 and name != "llama")


@pytest.mark.parametrize("activations", ["none", "host"])
def test_what_is_kept_changes_nothing(activations: str) -> None:
    """Graphs, inputs on the device, inputs in host memory: the same weights."""
    found = []
    for keep in ("block", activations):
        model = load()
        train(LOMO(model, activations=keep, fused=False), 3, 2)
        found.append(weights(model))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.matrix
@pytest.mark.parametrize("clip, micro", [(None, 1), (0.5, 2)])
def test_compiled_blocks_stream_too(clip: float | None, micro: int) -> None:
    """Traced by torch.compile (without a compiler here): streamed, in whole blocks or cut, == resident, and torch's SGD
    within rounding. Nothing breaks the graph of a block."""
    found, counters = [], torch._dynamo.utils.counters
    counters.clear()
    for how in (None, {"slot_count": 2}, {"max_unit_numel": 1, "slot_count": 9}):
        model = streamed(load(), **how) if how else load()
        train(LOMO(model, compile=IN_PLACE, max_grad_norm=clip), 2, micro)
        found.append(weights(model))
    assert all(torch.equal(found[0][key], other[key]) for other in found[1:] for key in found[0])
    assert not counters["graph_break"]
    expected = torch_sgd("llama", 2, micro, clip, 0.0)
    assert all(close(tensor, expected[key], 1e-6) for key, tensor in found[0].items())


def test_the_product_that_nobody_needs_is_left_out() -> None:
    """After the first reverse the last product of a Llama block is not made again; a Gemma 2 block needs it."""
    llama, gemma = LOMO(load()), LOMO(load("gemma2"))
    for opt in (llama, gemma):
        opt.step(micro_batches(0, 1))
    assert [one.last_product[False] for one in llama.reverse.recompute] == [6] * LAYERS
    assert [one.last_product[False] for one in gemma.reverse.recompute] == [None] * LAYERS


@pytest.mark.gpu
@in_every_run(lambda name, dtype: dtype == "bfloat16" or name == "llama" or (name, dtype) == ("opt", "float32"))
@pytest.mark.parametrize("method", [LOMO, AdaLOMO])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "opt", "qwen2", "mixtral", "gemma3"])
def test_streamed_equals_resident_on_a_gpu(name: str, dtype: str, method: type) -> None:
    """Inputs of blocks in host memory or not."""
    models = under_random_delays(partial(load, name, device="cuda", dtype=dtype))
    kept = iter(("block", "block", "host"))
    steps = [micro_batches(t, 2) for t in range(4)]
    assert_trained_alike(models, lambda model: method(model, 0.05, max_grad_norm=0.7, activations=next(kept)), steps)
