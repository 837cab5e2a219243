"""Zeroth-order steps against the textbook, against themselves streamed, and at the edges."""

import random
from functools import lru_cache
from typing import Any

import pytest
import torch

import keyhole
from keyhole import ops
from keyhole.errors import UserError
from keyhole.model.batch import to_device
from keyhole.model.skeleton import build
from keyhole.offload.wire import Wire
from keyhole.ops.loss import RunningNLL
from keyhole.plan import placement
from keyhole.plan.memory import Workload
from tests.model.decoders import NAMES, TWELVE, batch, config
from tests.model.streaming import streamed

EPS, SEED = 1e-2, 7


def load(name: str = "llama", **options: Any) -> keyhole.Model:
    return keyhole.load(config(name), init="random", **{"device": "cpu", **options})


def weights(model: keyhole.Model) -> list[torch.Tensor]:
    return [tensor.detach().clone() for _, tensor in model.named_tensors()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


def train(
    model: keyhole.Model, steps: int, batches: list | None = None, lr: float = 1e-3, **options: Any
) -> list[float]:
    """Steps with a falling learning rate; returns the losses, and leaves nothing pending."""
    opt = keyhole.ZO(model, **{"eps": EPS, "seed": SEED, **options})
    losses = []
    for t in range(steps):
        opt.lr = lr * (1 - t / 40)
        losses.append(opt.step(batches or [batch(seed=t)]))
    opt.flush()
    return [loss.item() for loss in losses]


@torch.no_grad()
def textbook(model: keyhole.Model, steps: int, q: int, weight_decay: float, micro: int) -> None:
    """MeZO as in the textbook: perturb all weights, call the model, put them back, update."""
    params = model.layout.tensors

    def z(tensor: Any, t: int, i: int) -> torch.Tensor:
        return flat_z(t, i)[tensor.start : tensor.stop].view(tensor.shape)

    @lru_cache(maxsize=q)
    def flat_z(t: int, i: int) -> torch.Tensor:
        return ops.noise(model.layout.numel, offset=0, seed=SEED, step=t, direction=i)

    def loss(batches: list) -> torch.Tensor:
        sums, count = [], 0
        for one in batches:
            b = to_device(one, model.device)
            running = RunningNLL(b.target_N)
            running.add(model.head.logits(model.hidden(b)), 0)
            sums.append(running.nll_N().sum())
            count += b.token_count
        return torch.stack(sums).sum() / count

    for t in range(steps):
        batches = [batch(seed=micro * t + k, length=10 + k) for k in range(micro)]
        clean = [p.param.data.clone() for p in params]
        g = []
        for i in range(q):
            losses = []
            for sign in (1, -1):
                for p, w in zip(params, clean, strict=True):
                    p.param.data.copy_(w + sign * (EPS * z(p, t, i)))
                losses.append(loss(batches))
            g.append((losses[0] - losses[1]) / (2 * EPS))
        lr = torch.tensor(1e-3 * (1 - t / 40))
        for p, w in zip(params, clean, strict=True):
            u = sum((g[i] / q * z(p, t, i) for i in range(1, q)), g[0] / q * z(p, t, 0))
            p.param.data.copy_(w - lr * (u + weight_decay * w))


@pytest.mark.parametrize(
    "name, q, weight_decay, micro",
    [("llama", 1, 0.0, 1), ("llama", 1, 0.1, 1), ("llama", 4, 0.1, 1), ("llama", 2, 0.1, 2), ("opt", 4, 0.1, 1)],
)
def test_equals_the_textbook_loop(name: str, q: int, weight_decay: float, micro: int) -> None:
    """20 steps in fp32 give the textbook's weights to the bit, with directions, decay, a schedule, accumulation."""
    book, ours = load(name), load(name)
    textbook(book, 20, q, weight_decay, micro)
    opt = keyhole.ZO(ours, eps=EPS, seed=SEED, directions=q, weight_decay=weight_decay)
    for t in range(20):
        opt.lr = 1e-3 * (1 - t / 40)
        opt.step([batch(seed=micro * t + k, length=10 + k) for k in range(micro)])
    opt.flush()
    assert equal(weights(book), weights(ours))


@pytest.mark.parametrize("name", NAMES)
def test_streamed_equals_resident(name: str) -> None:
    """Losses and weights after 20 steps (5 beyond the twelve) are the same bits, slots poisoned when freed."""
    steps = 20 if name in TWELVE else 5
    resident = load(name)
    whole = streamed(resident, chaos=random.Random(0))
    expected = train(resident, steps)
    assert train(whole, steps) == expected
    assert equal(weights(resident), weights(whole))


@pytest.mark.parametrize("name", NAMES)
def test_cut_units_equal_whole_blocks(name: str) -> None:
    """Every matrix a unit of its own, two slots: still the same bits."""
    resident = load(name)
    cut = streamed(resident, max_unit_numel=1, slot_count=2, chaos=random.Random(1))
    assert train(cut, 2) == train(resident, 2)
    assert equal(weights(resident), weights(cut))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_streams_exactly(dtype: str) -> None:
    """Stochastic rounding depends on the element, not on where it lives."""
    resident = load(dtype=dtype)
    other = streamed(resident, max_unit_numel=1)
    batches = [batch(seed=1), batch(seed=2, length=6)]
    assert train(resident, 5, batches, directions=2) == train(other, 5, batches, directions=2)
    assert equal(weights(resident), weights(other))


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wire_formats_stream_exactly(wire: str, dtype: str) -> None:
    """Whatever weights are stored and moved in, streamed equals resident, and what is saved is what was trained."""
    resident, other = load(dtype=dtype, wire=wire), load(dtype=dtype, wire=wire, placement="stream")
    batches = [batch(seed=1), batch(seed=2, length=6)]
    assert train(resident, 3, batches, directions=2) == train(other, 3, batches, directions=2)
    assert equal(weights(resident), weights(other))
    assert torch.equal(resident.nll(batches[0])[0], other.nll(batches[0])[0])


def test_fp8_loses_little_of_the_loss() -> None:
    """Blocks in 8 bits give about the loss of the weights they were made from, and halve the bytes of 16 bit."""
    plain, packed = load(dtype="bfloat16", placement="stream"), load(dtype="bfloat16", placement="stream", wire="fp8")
    (a, _), (b, _) = plain.nll(batch()), packed.nll(batch())
    torch.testing.assert_close(a, b, rtol=0.02, atol=0.0)
    blocks = [u for u in plain.layout.units if u.kind == "block"]
    sizes = [sum(m.engine.homes[u.index].nbytes for u in blocks) for m in (plain, packed)]
    assert sizes[1] / sizes[0] == pytest.approx((1 + 1 / 64) / 2)


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
    opt.step(batches)
    opt.step(batches)
    up, down = model.engine.bytes_up, model.engine.bytes_down
    opt.step(batches)
    size = sum(model.layout.units[i].numel for i in model.engine.streamed) * 4
    assert (model.engine.bytes_up - up, model.engine.bytes_down - down) == (size, size)


def test_resume_is_exact() -> None:
    """N + M steps equal N, state out, state in, M."""
    whole, parts = load(), load()
    train(whole, 6, [batch()])
    first = keyhole.ZO(parts, eps=EPS, seed=SEED)
    for t in range(2):
        first.lr = 1e-3 * (1 - t / 40)
        first.step(batch())
    state = first.state_dict()
    second = keyhole.ZO(parts, eps=EPS, seed=SEED)
    second.load_state_dict(state)
    for t in range(2, 6):
        second.lr = 1e-3 * (1 - t / 40)
        second.step(batch())
    second.flush()
    assert equal(weights(whole), weights(parts))
    with pytest.raises(UserError, match="seed"):
        keyhole.ZO(parts, seed=8).load_state_dict(state)


def test_frozen_parameters_stay() -> None:
    """What requires no gradient is neither perturbed nor updated; the rest is."""
    model = load("qwen2")
    frozen = [t for t in model.layout.tensors if "mlp" in t.name or "embed" in t.name]
    for tensor in frozen:
        tensor.param.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.named_tensors()}
    train(model, 3)
    still = {name for name, tensor in model.named_tensors() if torch.equal(tensor, before[name])}
    assert still == {t.name for t in frozen}


def test_everything_frozen_is_refused() -> None:
    """A model with nothing to train is the user's mistake."""
    model = load()
    model.module.requires_grad_(False)
    with pytest.raises(UserError, match="frozen"):
        keyhole.ZO(model)


def test_a_non_finite_loss_changes_nothing() -> None:
    """When the loss overflows, the update is exactly zero, weight decay included."""
    model = load()
    with torch.no_grad():
        next(t for t in model.layout.tensors if "lm_head" in t.name).param.data.fill_(3e38)
    before = weights(model)
    opt = keyhole.ZO(model, lr=1e-2, eps=EPS, weight_decay=0.1)
    loss = opt.step(batch())
    opt.flush()
    assert not torch.isfinite(loss) and equal(before, weights(model))


def test_clip_bounds_the_projected_gradient() -> None:
    """|g| is at most `clip`, and the update is that of the clipped g."""
    model = load()
    opt = keyhole.ZO(model, lr=1e-3, eps=EPS, clip=1e-3)
    opt.step(batch())
    assert opt.metrics()["projected_grad"] == pytest.approx(1e-3)


def test_stochastic_rounding_moves_bf16_where_nearest_stalls() -> None:
    """A step far below the spacing of bf16 is made in full on average; rounded to nearest most of it is lost."""
    made = {}
    for rounding in ("stochastic", "nearest"):
        model = load(dtype="bfloat16")
        before = model.engine.homes[2].float()
        opt = keyhole.ZO(model, eps=EPS, rounding=rounding)
        opt.step(batch())
        opt.pending.coef.copy_(torch.tensor([1e-6, 1.0]))
        opt.flush()
        z = ops.noise(before.numel(), offset=model.layout.units[2].start, seed=0, step=0)
        made[rounding] = float((before - model.engine.homes[2].float()) @ z / (1e-6 * z @ z))
    assert 0.8 < made["stochastic"] < 1.2
    assert made["nearest"] < 0.5


def test_saving_and_looking_apply_the_last_update(tmp_path: Any) -> None:
    """Who forgets flush() finds the weights after the last step all the same."""
    models = [load(placement="stream") for _ in range(3)]
    opts = [keyhole.ZO(model, 1e-2, eps=EPS) for model in models]
    for opt in opts:
        opt.step(batch())
    opts[0].flush()
    models[1].save_pretrained(tmp_path / "out")
    models[2].nll(batch())
    assert all(opt.pending is None and equal(weights(models[0]), weights(opt.model)) for opt in opts)


@pytest.mark.parametrize("lr", [float("nan"), -1.0, float("inf"), "1e-3", None])
def test_what_is_no_learning_rate_is_refused(lr: Any) -> None:
    for method in (keyhole.ZO, keyhole.LOMO, keyhole.LSP, keyhole.AdamOffload):
        with pytest.raises(UserError, match="lr: .* is no learning rate"):
            method(load(), lr)


def test_it_learns() -> None:
    """On one batch, the loss falls."""
    model = load()
    losses = train(model, 30, [batch()], lr=5e-3, directions=4, distribution="rademacher")
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["opt", "llama", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_gpu_streamed_equals_resident_under_random_delays(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 random schedules with delayed streams and poisoned slots give the resident run's bits."""
    monkeypatch.setattr(placement, "TABLES_BYTES", 0)  # the tables are streamed too
    small = {"device": "cuda", "dtype": dtype}
    resident = load(name, **small)
    expected = train(resident, 4)
    for schedule in range(50):
        model = load(name, **small, placement="stream", chaos=random.Random(schedule))
        assert train(model, 4) == expected, schedule
        assert equal(weights(resident), weights(model)), schedule
        model.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["opt", "llama", "gpt2", "gemma2", "mixtral", "falcon_alibi"])
def test_graphs_change_no_number(name: str) -> None:
    """Blocks launched as CUDA graphs give the bits of blocks launched kernel by kernel, resident and streamed."""
    batches = [batch(seed=1), batch(seed=2, length=6)]
    expected = train(plain := load(name, device="cuda", graphs=False), 8, batches, directions=2)
    for where in ("resident", "stream"):
        model = load(name, device="cuda", placement=where)
        assert train(model, 8, batches, directions=2) == expected
        assert equal(weights(plain), weights(model))
        if name in ("opt", "llama"):
            assert any(model.graphs.checked.values()) and all(model.graphs.recorded.values())
        model.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_compiled_on_the_gpu_streamed_equals_resident(name: str) -> None:
    """Compiled, with graphs and without, streamed under random delays: one result, near that of plain blocks."""
    plain, found = train(load(name, device="cuda"), 6, directions=2), []
    for how in ({"graphs": False}, {}, {"placement": "stream", "chaos": random.Random(3)}):
        model = load(name, device="cuda", workload=Workload(whole_blocks=True), **how)
        found.append((train(model, 6, directions=2, compile=True), [w.cpu() for w in weights(model)]))
        model.close()
    assert all(losses == found[0][0] and equal(found[0][1], there) for losses, there in found)
    assert found[0][0] == pytest.approx(plain, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_first_update_on_the_gpu_is_that_of_the_cpu() -> None:
    """Noise, arithmetic and rounding agree between devices to the bit, given the same projected gradient."""
    models = [load(dtype="bfloat16", device=device) for device in ("cpu", "cuda")]
    for mine, theirs in zip(models[0].layout.tensors, models[1].layout.tensors, strict=True):
        models[1].home(theirs).copy_(models[0].home(mine))
    for model in models:
        opt = keyhole.ZO(model, eps=EPS, weight_decay=0.1)
        opt.step(batch())
        opt.pending.coef.copy_(torch.tensor([1e-3, 0.7]))
        opt.flush()
    assert equal(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("wire", [None, "fp8"])
def test_replayed_updates_are_the_updates(tiny_model: Any, wire: str | None) -> None:
    """All updates of a unit before the next unit: the weights of the run, bit for bit, as many of them changed."""
    how = {"device": "cpu", "dtype": "bfloat16", "placement": "stream", "wire": wire}
    model, again = keyhole.load(tiny_model, **how), keyhole.load(tiny_model, **how)
    zo, other = (keyhole.ZO(m, lr=1e-3, directions=2, weight_decay=0.1) for m in (model, again))
    updates = []
    for step in range(3):
        ids = torch.randint(0, 200, (2, 8), generator=torch.Generator().manual_seed(step))
        zo.step({"input_ids": ids, "labels": ids})
        updates.append((zo.latest, 0.1))
    zo.flush()
    assert [unit.index for unit in other.replay(updates)] == list(range(len(model.layout.units)))
    theirs = dict(again.named_tensors())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.named_tensors())
    assert int(zo.changed) == int(other.changed) and other.pending is None


def test_fp8_goes_on_from_saved_weights_of_ragged_matrices() -> None:
    """24 x 30 is no multiple of 64, so a matrix shares its last scale with padding, which nobody saves."""

    def fresh() -> tuple[keyhole.Model, keyhole.ZO]:
        shape = config("llama", hidden_size=24, intermediate_size=30)
        model = keyhole.load(shape, init="random", device="cpu", dtype="bfloat16", placement="stream", wire="fp8")
        return model, keyhole.ZO(model, lr=0.05, eps=EPS, clip=1.0)

    (through, one), (stopped, two), (again, three) = (fresh() for _ in range(3))
    for t in range(3):
        for opt in (one, two):
            opt.step([batch(seed=t)])
    three.load_state_dict(two.state_dict())
    saved = dict(stopped.named_tensors())
    for tensor in again.layout.tensors:
        again.homes.fill(tensor, lambda p, name=tensor.name: p.copy_(saved[name]))
    for t in range(3, 6):
        for opt in (one, three):
            opt.step([batch(seed=t)])
    assert one.state_dict() == three.state_dict()  # flushed
    assert equal(weights(through), weights(again))


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
    layout, _ = placement.place(module, *where, Workload(whole_blocks=True))
    assert len(layout.of_kind("block")) == layout.block_count


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("kind", ["block", "head"])
@pytest.mark.parametrize("retries", [True, False])
def test_a_step_that_breaks_off_updates_no_weight_twice(name: str, kind: str, retries: bool) -> None:
    """An interrupt at a unit in the middle: the step again, or a flush, ends as if there had been none."""

    def run(model: keyhole.Model, breaks: bool) -> list[torch.Tensor]:
        opt, real = keyhole.ZO(model, 1e-2, eps=EPS, seed=SEED), model.engine.acquire
        last = (model.layout.of_kind("block")[1:2] if kind == "block" else model.layout.head_units)[-1]

        def acquire(page: int, changes: bool = True) -> torch.Tensor:
            if page == last.index:
                raise KeyboardInterrupt
            return real(page, changes)

        opt.step(batch(seed=0))
        if breaks:
            model.engine.acquire = acquire
            with pytest.raises(KeyboardInterrupt):
                opt.step(batch(seed=1))
            model.engine.acquire = real
        if retries:
            opt.step(batch(seed=1))
        opt.flush()
        return weights(model)

    expected = run(load(name), breaks=False)
    assert equal(expected, run(load(name), breaks=True))
    assert equal(expected, run(streamed(load(name), slot_count=2), breaks=True))
