"""Zeroth-order steps through compiled blocks: streamed == resident, no graph breaks, shapes that vary, whole blocks."""

import random

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.workload import Workload
from keyhole.methods.zo.traits import ZOConfig
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan import placement
from tests.matrix import in_every_run
from tests.methods.zo.loops import equal, train, weights
from tests.model.decoders import batch, config, load
from tests.model.streaming import streamed


@in_every_run(lambda name: name == "gemma3")
@pytest.mark.parametrize("name", ["llama", "opt", "gemma3"])
def test_compiled_blocks(name: str) -> None:
    """Traced by torch.compile (without a compiler here): streamed == resident, plain blocks within rounding, and
    nothing breaks the graph of a block."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    plain, resident, away = load(name), load(name), streamed(load(name), slot_count=2)
    expected = train(plain, 3, directions=2)
    found = [train(model, 3, directions=2, compile="aot_eager") for model in (resident, away)]
    assert found[0] == found[1] and equal(weights(resident), weights(away))
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]


def test_compiled_blocks_of_many_shapes() -> None:
    """Rows and lengths that vary: torch does not give up compiling, and so no block falls back to plain code."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=1):
        opt = keyhole.ZO(load("opt"), compile="eager")
        for rows, length in ((3, 16), (4, 8), (1, 8)):
            assert opt.step(batch(rows, length)).isfinite()
    assert counters["stats"]["unique_graphs"] > 1


def test_compiled_blocks_are_whole() -> None:
    with pytest.raises(UserError, match="cut in several units"):
        keyhole.ZO(streamed(load(), max_unit_numel=1, slot_count=3), compile="aot_eager")
    module, bf16 = build(config("llama"), torch.bfloat16), Wire(torch.bfloat16)
    where = ("stream", None, bf16, torch.device("cpu"))
    layout, _ = placement.place(module, *where, Workload(settings=ZOConfig(compile=True)))
    assert len(layout.of_kind("block")) == layout.block_count


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_compiled_on_the_gpu_streamed_equals_resident(name: str) -> None:
    """Compiled, with graphs and without, streamed under random delays: one result, near that of plain blocks."""
    plain, found = train(load(name, device="cuda"), 6, directions=2), []
    for how in ({"graphs": False}, {}, {"placement": "stream", "chaos": random.Random(3)}):
        model = load(name, device="cuda", workload=Workload(settings=ZOConfig(compile=True)), **how)
        found.append((train(model, 6, directions=2, compile=True), [w.cpu() for w in weights(model)]))
        model.close()
    assert all(losses == found[0][0] and equal(found[0][1], there) for losses, there in found)
    assert found[0][0] == pytest.approx(plain, rel=1e-3)
