"""Directions that follow the error: V by the book, streamed as resident, resumed, planned, and what is refused."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.workload import Room, Workload
from keyhole.methods.zo.low_rank import guide
from keyhole.methods.zo.low_rank.guide import RIDGE, predictors, principal_errors
from keyhole.methods.zo.memory import device_bytes
from keyhole.methods.zo.traits import ZOConfig
from keyhole.model.structure.reach import freeze
from tests.families.tiny import tiny_config
from tests.model import encoders
from tests.model.candidates import plain_candidates_loss, ragged
from tests.model.decoders import batch, config, load

GUIDED: dict[str, Any] = {"rank": 1, "refresh": 3, "guide": 64}


def solved(x_NI: torch.Tensor, y_N: torch.Tensor) -> torch.Tensor:
    """Ridge regression by a solver, scaled as a random direction of rank 1 is."""
    c_II = x_NI.t() @ x_NI / len(x_NI)
    v_I = torch.linalg.solve(c_II + RIDGE * c_II.diagonal().mean() * torch.eye(len(c_II)), x_NI.t() @ y_N)
    return v_I * (x_NI.square().sum(1).mean() / (x_NI @ v_I).square().mean()).sqrt()


def inputs_with_outliers(count: int = 300, width: int = 64) -> torch.Tensor:
    """As the inputs of layers are: a large common part, and a few columns that are much larger than the others."""
    torch.manual_seed(0)
    x_NI = torch.randn(count, width) + 4 * torch.randn(width)
    x_NI[:, 3] *= 30
    return x_NI


def test_directions_are_ridge_regression() -> None:
    x_NI, y_N = inputs_with_outliers(), torch.randn(300)
    (found_I,) = predictors(x_NI, y_N[:, None])
    torch.testing.assert_close(found_I, solved(x_NI, y_N), rtol=1e-3, atol=1e-4)


def test_errors_are_principal_components() -> None:
    """Two of three; of an error with one component only, the second is 0, and has no direction."""
    d_NH = torch.randn(200, 3, dtype=torch.float64) * torch.tensor([9.0, 3.0, 1.0]) @ torch.randn(3, 16).double()
    values = torch.linalg.svdvals(d_NH)
    found_Nr = principal_errors(d_NH, torch.randn(200, 2).double())
    torch.testing.assert_close(found_Nr.norm(dim=0), values[:2], rtol=1e-3, atol=0)
    one_Nr = principal_errors(torch.outer(torch.randn(200), torch.randn(16)), torch.randn(200, 2))
    assert one_Nr[:, 0].any() and not one_Nr[:, 1].any()
    x_NI = inputs_with_outliers(200)
    v_rI = predictors(x_NI, one_Nr)
    assert not v_rI[1].any() and not predictors(x_NI, torch.zeros(200, 2)).any()
    torch.testing.assert_close((x_NI @ v_rI[0]).square().mean(), x_NI.square().sum(1).mean() / 2)


def test_a_rank_above_the_components_of_the_error_has_random_columns_too() -> None:
    """Two answers have one component: at rank 2 the other column is the one that was drawn."""
    zo = keyhole.ZO(load("llama"), 1e-3, **GUIDED | {"rank": 2})
    drawn = zo.factors.v.clone()
    zo.guide.renew([with_two_answers()])
    for matrix in zo.factors.parts.matrices:
        before_rI, now_rI = (zo.factors.rows(v, matrix.v) for v in (drawn, zo.factors.v))
        assert not torch.equal(before_rI[0], now_rI[0]) and torch.equal(before_rI[1], now_rI[1]), matrix.tensor.name


def inputs_and_error(
    module: torch.nn.Module, loss: Callable[[], torch.Tensor]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """By the book: hooks for the inputs of every layer, by the names of their weights; autograd for the error at the
    head."""
    inputs, hidden = {}, []

    def keep(_: Any, args: tuple) -> None:
        args[0].retain_grad()
        hidden.append(args[0])

    for name, layer in module.named_modules():
        layer.register_forward_pre_hook(
            lambda _, args, n=name: inputs.update({f"{n}.weight": args[0].detach()} if args else {})
        )
    module.get_output_embeddings().register_forward_pre_hook(keep)
    with torch.enable_grad():
        loss().backward()
    return inputs, hidden[0].grad


def assert_directions(zo: keyhole.ZO, inputs: dict[str, torch.Tensor], d_NH: torch.Tensor) -> None:
    """V of every layer is that of these inputs [N, I], up to the sign."""
    y_N = d_NH @ torch.linalg.svd(d_NH, full_matrices=False)[2][0]
    for matrix in zo.factors.parts.matrices:
        (found_I,) = zo.factors.rows(zo.factors.v, matrix.v)
        expected_I = solved(inputs[matrix.tensor.name], y_N)
        expected_I = expected_I * torch.sign(expected_I @ found_I)
        assert float((found_I - expected_I).norm() / expected_I.norm()) < 1e-3, matrix.tensor.name


def with_two_answers(seed: int = 0) -> dict[str, torch.Tensor]:
    """Questions that all have the same two candidates, of one token."""
    one = ragged(24, seed)
    for parity, token in enumerate((5, 9)):
        rows = one["labels"][parity::2] != -100
        one["input_ids"][parity::2][rows] = one["labels"][parity::2][rows] = token
    right = torch.randint(0, 2, (24,), generator=torch.Generator().manual_seed(seed))
    one["answer"] = torch.stack([right, 1 - right], dim=1).flatten()
    return one


@pytest.mark.parametrize("pieces, kept", [(1, 1.0), (2, 0.5)])
def test_directions_are_those_of_the_plain_model(pieces: int, kept: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer, in one pass or two, up to the sign; where inputs have no room on the device, the same."""
    one = with_two_answers()
    model = keyhole.load(config("llama"), init="random", seed=3, device="cpu")
    zo = keyhole.ZO(model, 1e-3, **GUIDED)
    inputs = sum(matrix.inputs for matrix in zo.factors.parts.matrices)
    monkeypatch.setattr(guide, "KEPT_BYTES", int(kept * 4 * 24 * inputs))
    half = {name: x[:24] for name, x in one.items()}, {name: x[24:] for name, x in one.items()}
    half[1]["question"] = half[0]["question"].clone()
    zo.guide.renew([one] if pieces == 1 else list(half))
    module = keyhole.load(config("llama"), init="random", seed=3, device="cpu").module
    inputs, grad_BTH = inputs_and_error(module, lambda: plain_candidates_loss(module, [one]) * 24)
    where = (one["labels"][::2, 1:] != -100).nonzero(as_tuple=True)  # both candidates are behind one prompt
    layers = {n: x[::2][where] for n, x in inputs.items() if n.endswith("_proj.weight")}
    assert layers.keys() == {matrix.tensor.name for matrix in zo.factors.parts.matrices}
    assert_directions(zo, layers, (grad_BTH[::2] + grad_BTH[1::2])[where])


@pytest.mark.parametrize("family", ["gpt2", "opt", "falcon", "bloom", "gemma2", "cohere"])
def test_directions_of_other_families(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss over tokens; transposed matrices, fused ones, ReLUs that sketch, heads that scale and cap logits: V of
    every layer from hooks and autograd on the module of Transformers."""
    monkeypatch.setattr(guide, "POWER_STEPS", 400)  # components of random errors are nearly equal
    monkeypatch.setattr(guide, "SOLVER_STEPS", 40)
    one = batch(seed=10)
    zo, plain = keyhole.ZO(load(family), 1e-3, **GUIDED), load(family).module
    zo.guide.renew([one])

    def loss() -> torch.Tensor:
        logits_BTV = plain(input_ids=one["input_ids"], use_cache=False).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), one["labels"][:, 1:].flatten())

    inputs, grad_BTH = inputs_and_error(plain, loss)
    where = torch.nn.functional.pad(one["labels"][:, 1:] != -100, (0, 1))
    names = [matrix.tensor.name for matrix in zo.factors.parts.matrices]
    layers = {name: inputs[name].reshape(where.numel(), -1)[where.flatten()] for name in names}
    assert_directions(zo, layers, grad_BTH[where])


def run(how: dict[str, Any], steps: int = 5, **options: Any) -> tuple[list[float], list[torch.Tensor], Any]:
    model = keyhole.load(config("llama"), init="random", seed=3, **options)
    zo = keyhole.ZO(model, 1e-3, **how)
    losses = [float(zo.step([ragged(seed=i)])) for i in range(steps)]
    zo.flush()
    return losses, [model.home(tensor).float().cpu() for tensor in model.layout.tensors], zo


@pytest.mark.parametrize("fold, kept_bytes", [(True, 2**28), (True, 0), (False, 2**28)])
def test_streamed_equals_resident(fold: bool, kept_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide, "KEPT_BYTES", kept_bytes)
    how = GUIDED | {"rank": 2, "fold": fold}
    resident = run(how, device="cpu", dtype="float32")
    away = run(how, device="cpu", dtype="float32", placement="stream")
    assert resident[0] == away[0] and all(map(torch.equal, resident[1], away[1]))
    if kept_bytes:
        assert resident[0] != run(how | {"guide": None}, device="cpu", dtype="float32")[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_gpu_streamed_and_recorded_equal_resident(dtype: str) -> None:
    how = GUIDED | {"refresh": 6}
    plain = run(how, 13, device="cuda", dtype=dtype, graphs=False)
    recorded = run(how, 13, device="cuda", dtype=dtype)
    away = run(how, 13, device="cuda", dtype=dtype, placement="stream")
    assert recorded[2].recorded.replays >= 2, recorded[2].recorded.recorder.why
    assert plain[0] == recorded[0] == away[0]
    assert all(map(torch.equal, plain[1], recorded[1])) and all(map(torch.equal, plain[1], away[1]))


def test_the_loss_over_tokens_and_frozen_layers() -> None:
    """V exists for trained layers only, and any batch can be looked at."""
    model = keyhole.load(config("llama"), init="random", seed=3, device="cpu")
    freeze(model.module, ["embeddings", "model.layers.0"])
    zo = keyhole.ZO(model, 1e-3, **GUIDED)
    before = zo.factors.v.clone()
    zo.step(batch(seed=1))
    assert not zo.factors.v.eq(before).any() and torch.isfinite(zo.factors.v).all()


def test_rows_without_a_trained_token_add_nothing() -> None:
    """As a batch beside another; alone they leave V as it was drawn."""
    rows, untrained = batch(seed=1), batch(seed=2)
    untrained["labels"] = torch.full_like(untrained["labels"], -100)

    def found(batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        zo = keyhole.ZO(load("llama"), 1e-3, **GUIDED)
        zo.guide.renew(batches)
        return zo.factors.v

    drawn = keyhole.ZO(load("llama"), 1e-3, **GUIDED).factors.v
    torch.testing.assert_close(found([rows]), found([untrained, rows]))
    assert torch.equal(found([untrained]), drawn) and not torch.equal(found([rows]), drawn)


def test_layers_that_see_other_tokens_are_told() -> None:
    """CPM-Ant puts tokens of its own before each row: no layer sees the batch, all V stay random, and a warning says
    so."""
    model = keyhole.load(tiny_config("cpmant"), init="random", device="cpu", dtype="float32")
    zo = keyhole.ZO(model, 1e-3, rank=1, refresh=1, guide=8)
    drawn = zo.factors.v.clone()
    count = len(zo.factors.parts.matrices)
    with pytest.warns(UserWarning, match=f"V of {count} of {count} layers is random"):
        zo.guide.renew([batch(seed=1)])
    assert torch.equal(zo.factors.v, drawn)
    seen = keyhole.ZO(load("llama"), 1e-3, **GUIDED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen.step(batch(seed=1))


def test_a_layer_that_is_called_twice_keeps_its_random_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("llama")
    mlp = model.blocks[1].mlp
    zo = keyhole.ZO(model, 1e-3, **GUIDED)
    drawn = zo.factors.v.clone()
    monkeypatch.setattr(mlp, "forward", lambda x: mlp.down_proj(mlp.gate_proj(x) * mlp.gate_proj(x) * mlp.up_proj(x)))
    zo.guide.renew([ragged()])
    twice = [m for m in zo.factors.parts.matrices if torch.equal(zo.factors.v[m.v], drawn[m.v])]
    assert [m.layer for m in twice] == [mlp.gate_proj]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_an_error_that_is_no_number_leaves_the_directions_random(poison: float) -> None:
    model = load("llama")
    zo = keyhole.ZO(model, 1e-3, **GUIDED)
    drawn = zo.factors.v.clone()
    with torch.no_grad():
        model.home(next(t for t in model.layout.tensors if "norm" in t.name)).fill_(poison)
    model.engine.invalidate()
    zo.guide.renew([ragged()])
    assert torch.equal(zo.factors.v, drawn)


@pytest.mark.parametrize("scale", [1e6, 1e-12])
def test_directions_beyond_float16_stay_random(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinite, or 0, in the dtype of compute."""
    monkeypatch.setattr(guide, "predictors", lambda x_NI, y_Nr: torch.full((1, x_NI.shape[1]), scale))
    model = keyhole.load(config("llama"), init="random", seed=3, device="cpu", dtype="float16")
    zo = keyhole.ZO(model, 1e-3, **GUIDED)
    drawn = zo.factors.v.clone()
    zo.guide.renew([ragged()])
    assert torch.equal(zo.factors.v, drawn)


def test_rows_ahead_are_used_once() -> None:
    """V from rows that are given, and from the step's own where none are."""
    model = keyhole.load(config("llama"), init="random", seed=3, device="cpu")
    zo = keyhole.ZO(model, 1e-3, **GUIDED)
    rows, tokens = zo.rows_ahead
    assert rows == 64 and tokens > 0
    zo.look_ahead([ragged(seed=9)])
    zo.step([ragged(seed=0)])
    ahead, own = zo.factors.v.clone(), run(GUIDED, 1, device="cpu")[2].factors.v
    assert zo.rows_ahead is None and not torch.equal(ahead, own)
    for i in range(2):
        zo.step([ragged(seed=i)])
    assert zo.rows_ahead is not None


def test_a_closure_needs_rows_that_are_given_before() -> None:
    """Refused without them, and nothing has changed; with them V is that of a step on a batch, for the whole period."""
    model = keyhole.load(config("llama"), init="random", seed=3, device="cpu")
    zo, rows = keyhole.ZO(model, 1e-3, **GUIDED), [ragged(seed=9)]

    def closure() -> torch.Tensor:
        return model.nll(batch(seed=1))[0].mean()

    with pytest.raises(UserError, match="look_ahead"):
        zo.step(closure)
    assert zo.step_count == 0 and zo.rows_ahead is not None
    zo.look_ahead(rows)
    zo.step(closure)
    found = zo.factors.v.clone()
    zo.step(closure)
    zo.step(batch(seed=2))
    other = keyhole.ZO(keyhole.load(config("llama"), init="random", seed=3, device="cpu"), 1e-3, **GUIDED)
    other.look_ahead(rows)
    other.step(batch(seed=1))
    assert torch.equal(found, other.factors.v) and zo.rows_ahead is not None
    with pytest.raises(UserError, match="look_ahead"):
        zo.step(closure)


@pytest.mark.parametrize("fold, steps", [(True, 4), (False, 4), (False, 3)])
@pytest.mark.parametrize("guide_first", [True, False])
def test_a_state_is_refused_with_another_kind_of_directions(fold: bool, steps: int, guide_first: bool) -> None:
    """V of the begun period, or of kept ones, would be replaced; where there is neither, nothing depends on it."""
    guided, random = (GUIDED | {"fold": fold, "guide": n} for n in (64, None))
    first, then = (guided, random) if guide_first else (random, guided)
    state = run(first, steps, device="cpu")[2].state_dict()
    model = keyhole.load(config("llama"), init="random", seed=3, device="cpu")
    with pytest.raises(UserError, match=r"zo\.guide must be as it was"):
        keyhole.ZO(model, 1e-3, **then).load_state_dict(state)
    keyhole.ZO(model, 1e-3, **first).load_state_dict(state)


def planned_bytes(guide: int, **about: Any) -> int:
    model, own = load("llama"), ZOConfig(rank=1, guide=guide)
    work = Workload("zo", 512, 2, own, length=64, **about)
    return device_bytes(model.layout, set(), work, Room(model.formats, 0)).total


def test_the_plan_counts_rows_and_positions_that_there_are() -> None:
    """No more rows than the data have; of the loss over tokens all trained positions, as many as are used."""
    few = planned_bytes(100, rows=100)
    assert few == planned_bytes(10**9, rows=100) < planned_bytes(10**9)
    choice, tokens = planned_bytes(64, chooses=True), planned_bytes(64)
    assert choice == planned_bytes(64, trained=1.0) < planned_bytes(64, trained=8.0) < tokens
    assert tokens == planned_bytes(64, trained=guide.MOST_POSITIONS / 64) == planned_bytes(64, trained=1e6)
    assert planned_bytes(64, chooses=True, trained=300.0) > tokens  # a choice needs all tokens of its candidates


@pytest.mark.parametrize("wrong, said", [({"rank": None}, "set zo.rank"), ({"guide": 0}, "guide")])
def test_what_does_not_go_together_is_refused(wrong: dict[str, Any], said: str) -> None:
    how = {"lr": 1e-3} | GUIDED | wrong
    with pytest.raises(UserError, match=said):
        keyhole.ZO(load("llama"), **how)
    with pytest.raises(UserError, match="guide=N"):
        keyhole.ZO(load("llama"), 1e-3, rank=1).look_ahead([ragged()])
    with pytest.raises(UserError, match="a language model whose head is a matrix"):
        keyhole.ZO(keyhole.load(encoders.config("bert"), init="random", device="cpu"), 1e-3, **GUIDED)
