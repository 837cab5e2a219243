"""Directions of low rank: LOZO by the book, streamed as resident, in the middle of a period, and what is saved."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.workload import Room, Workload
from keyhole.methods.zo.low_rank.parts import find_parts
from keyhole.methods.zo.memory import factor_bytes, kept_terms
from keyhole.methods.zo.traits import ZO as TRAITS
from keyhole.methods.zo.traits import ZOConfig
from keyhole.model.batch import to_device
from keyhole.model.forward.low_rank import NotByRows, Share
from keyhole.model.structure import find
from keyhole.model.weights.format import Wire
from keyhole.ops.loss import RunningNLL
from keyhole.plan.seconds import PROFILES
from tests.families.checks import small_stacks
from tests.families.tiny import tiny_config
from tests.matrix import in_every_run
from tests.methods.zo.loops import EPS, SEED, equal, train, weights
from tests.model.decoders import batch, config, load
from tests.model.streaming import streamed

RANK, REFRESH = 2, 2
LOW = {"rank": RANK, "refresh": REFRESH}


@torch.no_grad()
def lozo(model: keyhole.Model, steps: int, q: int) -> None:
    """By the book: perturb all weights, call the model, put them back, update. Linear layers by U V^T / sqrt(r)."""
    parts, params = find_parts(model, RANK), model.layout.tensors
    matrices = {id(m.tensor): m for m in parts.matrices}
    vectors = {id(v.tensor): v for v in parts.vectors}

    def noise(n: int, at: int, t: int, i: int = 0) -> torch.Tensor:
        return ops.draw_noise(n, offset=at, seed=SEED, step=t, direction=i)

    def z(tensor: Any, t: int, i: int) -> torch.Tensor:
        if m := matrices.get(id(tensor)):
            u = noise(RANK * m.outputs, parts.start + m.a.start, t, i).view(RANK, -1)
            v = noise(RANK * m.inputs, parts.v_start + m.v.start, t // REFRESH).view(RANK, -1)
            return (v.t() @ u if m.transposed else u.t() @ v) / RANK**0.5
        own = vectors.get(id(tensor))
        at = tensor.start if own is None else parts.start + own.at.start
        return noise(tensor.shape.numel(), at, t, i).view(tensor.shape)

    def loss(one: Any) -> torch.Tensor:
        b = to_device(one, model.device)
        running = RunningNLL(b.target_N)
        running.add(model.head.logits(model.hidden(b)), 0)
        return running.nll_N().sum() / b.token_count

    for t in range(steps):
        clean, g = [p.param.data.clone() for p in params], []
        for i in range(q):
            losses = []
            for sign in (1, -1):
                for p, w in zip(params, clean, strict=True):
                    p.param.data.copy_(w + sign * EPS * z(p, t, i))
                losses.append(loss(batch(seed=t)))
            g.append((losses[0] - losses[1]) / (2 * EPS))
        for p, w in zip(params, clean, strict=True):
            p.param.data.copy_(w - 1e-2 * sum(g[i] / q * z(p, t, i) for i in range(q)))


@in_every_run(lambda name: name in ("opt", "gpt2"))
@pytest.mark.parametrize("name, q", [("llama", 1), ("opt", 2), ("gpt2", 1), ("falcon", 1)])
def test_equals_lozo(name: str, q: int) -> None:
    """Three steps of periods of two, the last one unfinished: the weights as saved are the book's, up to rounding."""
    book, ours, before = load(name), load(name), load(name)
    lozo(book, 3, q)
    opt = keyhole.ZO(ours, 1e-2, eps=EPS, seed=SEED, directions=q, **LOW)
    assert opt.directions.layers.together
    for t in range(3):
        opt.step(batch(seed=t))
    for (tensor, found), expected, was in zip(ours.named_tensors(), weights(book), weights(before), strict=True):
        moved = float((expected - was).abs().max())
        assert moved > 1e-5 and float((found - expected).abs().max()) < 2e-3 * moved, tensor


@in_every_run(lambda name, dtype: name in ("gpt2", "opt") and (dtype == "bfloat16") == (name == "opt"))
@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "qwen3", "bloom"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streamed_equals_resident(name: str, dtype: str) -> None:
    """Whole and cut to single matrices, slots poisoned when freed, with an odd number of looks: the same losses and
    weights, to the bit."""
    resident = load(name, dtype=dtype)
    whole = streamed(resident, chaos=random.Random(0))
    cut = streamed(resident, max_unit_numel=1, slot_count=2, chaos=random.Random(1))
    for how in ({"lr": 1e-2}, {"lr": 1e-4, "estimator": "fzoo", "directions": 3}):
        expected = train(resident, 4, **how, **LOW)
        assert train(whole, 4, **how, **LOW) == expected == train(cut, 4, **how, **LOW)
        assert all(map(math.isfinite, expected))
        assert equal(weights(resident), weights(whole)) and equal(weights(resident), weights(cut))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_that_are_computed_in_tiles(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large matrix is cut by rows where it streams: factors are used and folded tile by tile, its bias is dense."""
    monkeypatch.setattr(find, "TILE_NUMEL", 8000)
    monkeypatch.setattr(find, "TILE_ROWS", 128)
    resident = keyhole.load(config("opt", ffn_dim=512), init="random", device="cpu", dtype=dtype)
    cut = streamed(resident, max_unit_numel=1, slot_count=2, chaos=random.Random(1))
    assert len([unit for unit in cut.layout.of_kind("block") if unit.rows]) == 2 * cut.layout.block_count
    assert train(cut, 4, lr=1e-2, **LOW) == train(resident, 4, lr=1e-2, **LOW)
    assert equal(weights(resident), weights(cut))


def test_nothing_is_written_back_within_a_period() -> None:
    """A unit comes up once per step, whatever the number of looks and batches, and once up and down per period."""
    model = streamed(load(), max_unit_numel=1, slot_count=2, keep=("table", "head"))
    opt = keyhole.ZO(model, 1e-3, eps=EPS, directions=2, **LOW)
    size, moved = sum(model.layout.units[i].numel for i in model.engine.streamed) * 4, []
    for t in range(2 * REFRESH):
        up, down = model.engine.bytes_up, model.engine.bytes_down
        opt.step([batch(seed=t), batch(seed=t + 50)])
        moved.append(model.engine.bytes_down - down)
        assert t == 0 or 0 < model.engine.bytes_up - up <= size * (1 + t % REFRESH)  # the first step also looks ahead
    assert moved == [0, size, 0, size]


def test_kept_factors_leave_the_weights_alone() -> None:
    """fold=False: no matrix of a block changes at home, and what is saved is what folding gives, up to rounding."""
    kept, folded = load(), load()
    before = dict(kept.named_tensors())
    before = {name: x.clone() for name, x in before.items()}
    losses = train(kept, 5, lr=1e-2, fold=False, **LOW)
    assert losses == pytest.approx(train(folded, 5, lr=1e-2, **LOW), rel=1e-4)
    for name, home in kept.named_tensors(merged=False):
        assert torch.equal(home, before[name]) == ("proj" in name), name
    for (name, ours), theirs in zip(kept.named_tensors(), weights(folded), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


@in_every_run(lambda name, fold: fold == (name == "opt"))
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_evaluation_sees_what_is_saved(name: str, fold: bool, tmp_path: Path) -> None:
    """In the middle of a period: losses and generated text of the model are those of its saved copy; training goes on
    as if nobody had looked."""
    model, quiet = load(name), load(name)
    expected = train(quiet, 4, lr=1e-2, fold=fold, **LOW)
    opt = keyhole.ZO(model, 1e-2, eps=EPS, seed=SEED, fold=fold, **LOW)
    found = []
    for t in range(4):
        opt.lr = 1e-2 * (1 - t / 40)
        found.append(float(opt.step([batch(seed=t)])))
        if t in (0, 2):
            nll, _ = model.nll(batch(seed=3))
            text = model.generate(batch()["input_ids"][:, :4], max_new_tokens=4, do_sample=False)
            model.save_pretrained(tmp_path / str(t))
            saved = keyhole.load(str(tmp_path / str(t)), device="cpu")
            torch.testing.assert_close(saved.nll(batch(seed=3))[0], nll, rtol=1e-4, atol=1e-4)
            again = saved.generate(batch()["input_ids"][:, :4], max_new_tokens=4, do_sample=False)
            assert torch.equal(again, text)
    assert found == expected and equal(weights(quiet), weights(model))


def test_another_method_finds_all_in_the_weights() -> None:
    """A method that is made on the model finds what was learned in the weights themselves, and no factors."""
    model = load("opt")
    train(model, 4, lr=1e-2, **LOW)
    expected = weights(model)
    keyhole.LOMO(model, 1e-3)
    assert model.methods.low_rank is None and equal(weights(model), expected)


def test_factors_that_were_merged_are_not_trained_on() -> None:
    """Once another method is made, layers do not see the factors: a step of theirs would learn nothing, in silence."""
    model = load()
    first = keyhole.ZO(model, 1e-3, rank=2)
    first.step(batch())
    keyhole.ZO(model, 1e-3)
    for rows in (batch(), lambda: 1.0):
        with pytest.raises(UserError, match="a new ZO"):
            first.step(rows)


def test_a_closure() -> None:
    """A loss from the outside is measured at the same looks as a batch, and gives the same step up to rounding."""
    ours, theirs = load("opt"), load("opt")
    opt = keyhole.ZO(ours, 1e-2, eps=EPS, seed=SEED, **LOW)
    train(theirs, 4, lr=1e-2, **LOW)
    for t in range(4):
        opt.lr = 1e-2 * (1 - t / 40)

        def loss(t: int = t) -> torch.Tensor:
            nll_B, count_B = ours.nll(batch(seed=t))
            return nll_B.sum() / count_B.sum()

        opt.step(loss)
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "mamba"])
def test_models_without_linear_layers_of_their_own_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="zo.rank: .* of this model's blocks is in no linear layer"):
        keyhole.ZO(load(name), rank=2)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"refresh": 0}, {"compile": True}, {"weight_decay": 0.1}])
def test_what_does_not_go_together_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"zo.rank|zo.refresh: found 0"):
        keyhole.ZO(load(), **{"rank": 2} | wrong)


def test_a_model_that_mixes_rows_gets_passes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a layer sees other shapes than rows of tokens, the step is made again with a pass per look, streamed too,
    and so are all later ones."""
    resident = load()
    away = streamed(resident, chaos=random.Random(0))
    assert Share(0, 2, rows=4, tokens=40).check(torch.zeros(40, 8)) is None
    for wrong in ((10, 4, 8), (20, 8), (2, 20, 8)):
        with pytest.raises(NotByRows):
            Share(0, 2, rows=4, tokens=40).check(torch.zeros(wrong))

    def refuse(share: Share, x: torch.Tensor) -> None:
        raise NotByRows("mixed")

    monkeypatch.setattr(Share, "check", refuse)
    expected = train(resident, 4, lr=1e-2, **LOW)
    assert not resident.methods.low_rank.together and train(away, 4, lr=1e-2, **LOW) == expected
    assert equal(weights(resident), weights(away))


def test_the_plan_counts_kept_terms_to_the_end_of_the_run() -> None:
    """All of them, in rooms as the device has them."""
    own = ZOConfig(rank=2, refresh=1, fold=False)
    model = load("opt", dtype="bfloat16")
    method = keyhole.ZO(model, 1e-2, rank=2, refresh=1, fold=False)
    for t in range(9):
        method.step(batch(seed=t))
    held = sum(a.nbytes + v.nbytes for a, v in method.factors.rooms)
    assert held == 2 * kept_terms(model.layout, own, 9) == 2 * kept_terms(model.layout, own, 16)
    assert factor_bytes(model.layout, own, 1, 2, 9) - factor_bytes(model.layout, own, 1, 2, 0) == held


def test_the_plan_knows_the_factors() -> None:
    """Instead of two perturbed units there are factors, whose bytes are those of the method; nothing goes down within a
    period."""
    model = load("opt")
    opt = keyhole.ZO(model, rank=2)
    own, layout = ZOConfig(rank=2), model.layout
    held = opt.factors.now.nbytes + opt.factors.looks.nbytes + opt.factors.v.nbytes
    planned = factor_bytes(layout, own, pairs=1, element_bytes=4)
    assert planned == held + opt.factors.now.nbytes + opt.factors.v.nbytes  # and those of a fold
    room, rates = Room(Wire(torch.float32), 0), PROFILES["h200"]
    away = {unit.index for unit in layout.of_kind("block")}
    down = [
        TRAITS.planned_work(layout, away, Workload("zo", 64, 2, settings), room, rates).down
        for settings in (ZOConfig(write_back_every=1), own, ZOConfig(rank=2, fold=False))
    ]
    assert down[0] == 50 * down[1] > down[2] == 0


def test_packed_weights_stay_as_they_are() -> None:
    """Kept factors beside weights in 8 bits: no byte of a block changes, and folding into them is refused."""
    model = load("opt", wire="fp8", placement="stream")
    blocks = [unit.index for unit in model.layout.of_kind("block")]
    before = [model.engine.homes[i].clone() for i in blocks]
    losses = train(model, 5, lr=1e-2, fold=False, **LOW)
    assert all(map(torch.equal, before, (model.engine.homes[i] for i in blocks))) and len(set(losses)) == 5
    with pytest.raises(UserError, match="zo.fold=false: weights that are packed are frozen"):
        keyhole.ZO(model)
    with pytest.raises(UserError, match="set zo.fold=false"):
        keyhole.ZO(load("opt", wire="fp8"), rank=2)


def test_a_rank_above_the_sides_of_all_matrices_is_refused() -> None:
    """More terms than a matrix has inputs or outputs reach nothing new. A narrower matrix beside wide ones is none."""
    model = load("mistral")  # k and v have 16 outputs, the others 32 and more
    assert torch.isfinite(keyhole.ZO(model, 1e-3, rank=32).step(batch()))
    with pytest.raises(UserError, match="zo.rank: found 33, and .* more than 32: .* set zo.rank=32 or less"):
        keyhole.ZO(load("mistral"), 1e-3, rank=33)


@small_stacks()
def test_a_few_experts_that_are_units_of_their_own_are_refused() -> None:
    """They are few enough to be trained at full size, but each unit has one of them only; as whole stacks they work."""
    small = tiny_config("dots3_note")
    whole = keyhole.load(small, init="random", device="cpu", dtype="float32")
    assert torch.isfinite(keyhole.ZO(whole, 1e-3, rank=1).step(batch()))
    cut = streamed(whole, max_unit_numel=1, config=small)
    with pytest.raises(UserError, match="is a stack of experts, each a unit of its own"):
        keyhole.ZO(cut, 1e-3, rank=1)


def test_the_start_block_says_how_v_is_found() -> None:
    """At random, with the rate that suits it, or from errors."""
    random, guided = (
        " ".join(keyhole.ZO(load("llama"), 1e-3, rank=3, guide=n).directions.layers.describe()) for n in (None, 5)
    )
    assert "the best rate is about 0.75 of" in random and "errors of" not in random
    assert "V from the errors of 5 rows" in guided and "best rate" not in guided
