"""Zeroth-order steps through the engine: the bits of the resident run, one crossing a step, on the GPU under delays."""

import random

import pytest

import keyhole
from keyhole.plan import fit
from tests.matrix import in_every_run
from tests.methods.zo.loops import EPS, check_one_visit, equal, train, weights
from tests.model.decoders import NAMES, TWELVE, batch, load
from tests.model.streaming import streamed


@in_every_run(lambda name: name in ("llama", "gpt2", "qwen2", "bloom", "mixtral"))
@pytest.mark.parametrize("name", NAMES)
def test_streamed_equals_resident(name: str) -> None:
    """Losses and weights after 4 steps (2 beyond the twelve) are the same bits, slots poisoned when freed."""
    steps = 4 if name in TWELVE else 2
    resident = load(name)
    whole = streamed(resident, chaos=random.Random(0))
    expected = train(resident, steps)
    assert train(whole, steps) == expected
    assert equal(weights(resident), weights(whole))


CUT = ["qwen2", "gpt2", "mixtral", "gemma3"]  # tied, transposed, with experts, with norms around each part
CUT += ["falcon_alibi", "gpt_oss", "qwen3_next", "mamba"]


@in_every_run(lambda name: name in CUT)
@pytest.mark.parametrize("name", NAMES)
def test_cut_units_equal_whole_blocks(name: str) -> None:
    """Every matrix a unit of its own, two slots: still the same bits."""
    resident = load(name)
    cut = streamed(resident, max_unit_numel=1, slot_count=2, chaos=random.Random(1))
    assert train(cut, 2) == train(resident, 2)
    assert equal(weights(resident), weights(cut))


@pytest.mark.parametrize("switch", ["overlap", "reuse_slots", "deferred_update"])
def test_ablations_change_no_number(switch: str) -> None:
    """Each optimisation can be switched off without moving a bit."""
    first = load("opt")
    options = {} if switch == "deferred_update" else {switch: False}
    second = streamed(first, **options)
    ours = {"deferred_update": False} if switch == "deferred_update" else {}
    assert train(first, 5) == train(second, 5, **ours)
    assert equal(weights(first), weights(second))


def test_a_unit_crosses_once_a_step() -> None:
    """However many directions and micro-batches there are, the bytes over the link are those of one visit."""
    resident = load()
    model = streamed(resident)
    opt = keyhole.ZO(model, directions=3, eps=EPS)
    batches = [batch(seed=k) for k in range(4)]
    check_one_visit(model, opt, batches)


LOW = {"rank": 2, "refresh": 2}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, how",
    [(name, {}) for name in ("opt", "llama", "mixtral")]
    + [(name, LOW) for name in ("opt", "llama", "qwen3", "gemma3")],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_gpu_streamed_equals_resident_under_random_delays(
    name: str, how: dict[str, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random schedules with delayed streams and poisoned slots give the resident run's bits."""
    monkeypatch.setattr(fit, "TABLES_BYTES", 0)  # the tables are streamed too
    small = {"device": "cuda", "dtype": dtype}
    resident = load(name, **small)
    expected = train(resident, 7, lr=1e-2 if how else 1e-3, **how)
    for schedule in range(10 if how else 50):
        model = load(name, **small, placement="stream", chaos=random.Random(schedule))
        assert train(model, 7, lr=1e-2 if how else 1e-3, **how) == expected, schedule
        assert equal(weights(resident), weights(model)), schedule
        model.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["opt", "llama", "gpt2", "gemma2", "mixtral", "falcon_alibi"])
@pytest.mark.parametrize("how", [{}, LOW], ids=["dense", "low rank"])
def test_graphs_change_no_number(name: str, how: dict[str, int]) -> None:
    """Blocks launched as CUDA graphs give the bits of blocks launched kernel by kernel, resident and streamed. With
    factors each has a graph of its own."""
    if how and name not in ("opt", "llama", "gpt2"):
        pytest.skip("one kind of each is enough")
    batches = [batch(seed=1), batch(seed=2, length=6)]
    expected = train(plain := load(name, device="cuda", graphs=False), 9, batches, directions=2, **how)
    for where in ("resident", "stream"):
        model = load(name, device="cuda", placement=where)
        assert train(model, 9, batches, directions=2, **how) == expected
        assert equal(weights(plain), weights(model))
        if name in ("opt", "llama") and (where == "resident" or not how):
            assert any(model.graphs.checked.values()) and all(model.graphs.recordings.values())
        model.close()
