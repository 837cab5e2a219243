"""Directions that follow the error: V by the book, streamed as resident, resumed, replayed, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import keyhole
from keyhole.cli import main
from keyhole.config import TrainConfig
from keyhole.data.dataset import Dataset
from keyhole.data.loader import Loader
from keyhole.errors import UserError
from keyhole.methods.workload import Room, Workload
from keyhole.methods.zo.low_rank import error_directions, guide
from keyhole.methods.zo.low_rank.error_directions import RIDGE, predictors, principal_errors
from keyhole.methods.zo.memory import device_bytes
from keyhole.methods.zo.traits import ZOConfig
from keyhole.model.structure.freeze import freeze
from keyhole.training.start import check_ranks
from tests.families.tiny import tiny_config
from tests.matrix import in_every_run
from tests.methods.zo.loops import load
from tests.model.candidates import plain_candidates_loss, ragged
from tests.model.decoders import batch, config

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
    ((found_I,),) = predictors(x_NI[None], y_N[:, None])
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
    (v_rI,) = predictors(x_NI[None], one_Nr)
    assert not v_rI[1].any()
    torch.testing.assert_close((x_NI @ v_rI[0]).square().mean(), x_NI.square().sum(1).mean() / 2)


def test_a_rank_above_the_components_of_the_error_has_random_columns_too() -> None:
    """Two answers have one component: at rank 2 the other column is the one that was drawn."""
    zo = keyhole.ZO(load("llama"), 1e-3, **GUIDED | {"rank": 2})
    drawn = zo.factors.v.clone()
    zo.guide.renew(zo, [with_two_answers()])
    for matrix in zo.factors.parts.matrices:
        before_rI, now_rI = (zo.factors.rows(v, matrix.v) for v in (drawn, zo.factors.v))
        assert not torch.equal(before_rI[0], now_rI[0]) and torch.equal(before_rI[1], now_rI[1]), matrix.tensor.name


def test_without_an_error_there_is_no_direction() -> None:
    assert not predictors(inputs_with_outliers()[None], torch.zeros(300, 2)).any()


def plain_directions(model: keyhole.Model, one: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """V of every linear layer of the blocks by the book: hooks for the inputs, autograd for the error at the head."""
    module, inputs, hidden = model.module, {}, []
    layers = {n: m for n, m in module.named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in n}
    handles = [m.register_forward_hook(lambda _, args, __, n=n: inputs.update({n: args[0]})) for n, m in layers.items()]

    def keep(_: Any, args: tuple) -> None:
        args[0].retain_grad()
        hidden.append(args[0])

    handles.append(module.lm_head.register_forward_pre_hook(keep))
    with torch.enable_grad():
        (plain_candidates_loss(module, [one]) * len(one["question"].unique())).backward()
    for handle in handles:
        handle.remove()
    where = (one["labels"][::2, 1:] != -100).nonzero(
        as_tuple=True
    )  # both candidates of a question are behind one prompt
    grad_BTH = hidden[0].grad
    d_NH = (grad_BTH[::2] + grad_BTH[1::2])[where]
    _, _, rows = torch.linalg.svd(d_NH, full_matrices=False)
    return {n: solved(x[::2][where].detach(), d_NH @ rows[0]) for n, x in inputs.items()}


def with_two_answers(seed: int = 0) -> dict[str, torch.Tensor]:
    """Questions that all have the same two candidates, of one token."""
    one = ragged(24, seed)
    for parity, token in enumerate((5, 9)):
        rows = one["labels"][parity::2] != -100
        one["input_ids"][parity::2][rows] = one["labels"][parity::2][rows] = token
    right = torch.randint(0, 2, (24,), generator=torch.Generator().manual_seed(seed))
    one["answer"] = torch.stack([right, 1 - right], dim=1).flatten()
    return one


@pytest.mark.parametrize("kept_bytes", [2**28, 0])
@pytest.mark.parametrize("pieces", [1, 2])
def test_directions_are_those_of_the_plain_model(pieces: int, kept_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer, in one pass or two, from inputs that are kept and from those of a second sweep; up to the sign."""
    monkeypatch.setattr(guide, "KEPT_BYTES", kept_bytes)
    one = with_two_answers()
    model = keyhole.load(config("llama"), init="random", seed=3, device="cpu")
    zo = keyhole.ZO(model, 1e-3, **GUIDED)
    half = {name: x[:24] for name, x in one.items()}, {name: x[24:] for name, x in one.items()}
    half[1]["question"] = half[0]["question"].clone()
    zo.guide.renew(zo, [one] if pieces == 1 else list(half))
    expected = plain_directions(keyhole.load(config("llama"), init="random", seed=3, device="cpu"), one)
    assert len(expected) == len(zo.factors.parts.matrices)
    for matrix in zo.factors.parts.matrices:
        (found_I,) = zo.factors.rows(zo.factors.v, matrix.v)
        expected_I = expected[matrix.tensor.name.removesuffix(".weight")]
        expected_I = expected_I * torch.sign(expected_I @ found_I)
        assert float((found_I - expected_I).norm() / expected_I.norm()) < 1e-3, matrix.tensor.name


@pytest.mark.parametrize("family", ["gpt2", "opt", "falcon", "bloom", "gemma2", "cohere"])
def test_directions_of_other_families(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss over tokens; transposed matrices, fused ones, ReLUs that sketch, heads that scale and cap logits: V of
    every layer from hooks and autograd on the module of Transformers."""
    monkeypatch.setattr(error_directions, "POWER_STEPS", 400)  # components of random errors are nearly equal
    monkeypatch.setattr(error_directions, "SOLVER_STEPS", 40)
    one = batch(seed=10)
    zo, plain = keyhole.ZO(load(family), 1e-3, **GUIDED), load(family).module
    zo.guide.renew(zo, [one])
    inputs, hidden = {}, []
    for name, module in plain.named_modules():
        module.register_forward_pre_hook(
            lambda _, args, n=name: inputs.update({f"{n}.weight": args[0]} if args else {})
        )

    def keep(_: Any, args: tuple) -> None:
        args[0].retain_grad()
        hidden.append(args[0])

    plain.get_output_embeddings().register_forward_pre_hook(keep)
    logits_BTV = plain(input_ids=one["input_ids"], use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), one["labels"][:, 1:].flatten()).backward()
    where = torch.nn.functional.pad(one["labels"][:, 1:] != -100, (0, 1))
    d_NH = hidden[0].grad[where]
    y_N = d_NH @ torch.linalg.svd(d_NH, full_matrices=False)[2][0]
    for matrix in zo.factors.parts.matrices:
        (found_I,) = zo.factors.rows(zo.factors.v, matrix.v)
        x_NI = inputs[matrix.tensor.name].detach().reshape(where.numel(), -1)[where.flatten()]
        expected_I = solved(x_NI, y_N) * torch.sign(solved(x_NI, y_N) @ found_I)
        assert float((found_I - expected_I).norm() / expected_I.norm()) < 1e-3, matrix.tensor.name


def run(how: dict[str, Any], steps: int = 7, **options: Any) -> tuple[list[float], list[torch.Tensor], Any]:
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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_gpu_streamed_and_recorded_equal_resident(dtype: str) -> None:
    how = GUIDED | {"refresh": 6}
    plain = run(how, 13, device="cuda", dtype=dtype, graphs=False)
    recorded = run(how, 13, device="cuda", dtype=dtype)
    away = run(how, 13, device="cuda", dtype=dtype, placement="stream")
    assert recorded[2].recorded.replays >= 2, recorded[2].recorded.why
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


@pytest.mark.parametrize("kept_bytes", [2**28, 0])
def test_rows_without_a_trained_token_add_nothing(kept_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a batch beside another; alone they leave V as it was drawn."""
    monkeypatch.setattr(guide, "KEPT_BYTES", kept_bytes)
    rows, untrained = batch(seed=1), batch(seed=2)
    untrained["labels"] = torch.full_like(untrained["labels"], -100)

    def found(batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        zo = keyhole.ZO(load("llama"), 1e-3, **GUIDED)
        zo.guide.renew(zo, batches)
        return zo.factors.v

    drawn = keyhole.ZO(load("llama"), 1e-3, **GUIDED).factors.v
    torch.testing.assert_close(found([rows]), found([untrained, rows]))
    assert torch.equal(found([untrained]), drawn) and not torch.equal(found([rows]), drawn)


def test_layers_that_see_other_tokens_are_told() -> None:
    """CPM-Ant puts tokens of its own before each row: no layer sees the batch, all V stay random, and a line says so
    once."""
    model = keyhole.load(tiny_config("cpmant"), init="random", device="cpu", dtype="float32")
    zo = keyhole.ZO(model, 1e-3, rank=1, refresh=1, guide=8)
    drawn = zo.factors.v.clone()
    zo.guide.renew(zo, [batch(seed=1)])
    count = len(zo.factors.parts.matrices)
    assert torch.equal(zo.factors.v, drawn)
    (line,) = zo.news()
    assert f"V of {count} of {count} layers is random" in line
    zo.step(batch(seed=1))
    zo.step(batch(seed=2))
    assert zo.news() == []
    seen = keyhole.ZO(load("llama"), 1e-3, **GUIDED)
    seen.step(batch(seed=1))
    assert seen.news() == []


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_an_error_that_is_no_number_leaves_the_directions_random(poison: float) -> None:
    model = load("llama")
    zo = keyhole.ZO(model, 1e-3, **GUIDED)
    drawn = zo.factors.v.clone()
    with torch.no_grad():
        model.home(next(t for t in model.layout.tensors if "norm" in t.name)).fill_(poison)
    model.engine.invalidate()
    zo.guide.renew(zo, [ragged()])
    assert torch.equal(zo.factors.v, drawn)


@pytest.mark.parametrize("scale", [1e6, 1e-12])
def test_directions_beyond_float16_stay_random(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinite, or 0, in the dtype of compute."""
    monkeypatch.setattr(guide, "predictors", lambda x_KNI, y_Nr: torch.full((len(x_KNI), 1, x_KNI.shape[2]), scale))
    model = keyhole.load(config("llama"), init="random", seed=3, device="cpu", dtype="float16")
    zo = keyhole.ZO(model, 1e-3, **GUIDED)
    drawn = zo.factors.v.clone()
    zo.guide.renew(zo, [ragged()])
    assert torch.equal(zo.factors.v, drawn)


@in_every_run(lambda fold, first: fold == (first == 4))
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("first", [4, 6])
def test_goes_on_in_the_middle_of_a_period(fold: bool, first: int) -> None:
    """From a state after 4 steps of periods of 3, and after 6, where the next V is not known yet."""
    how = GUIDED | {"rank": 2, "fold": fold}
    whole = run(how, 10, device="cpu", dtype="float32")
    losses, _, zo = run(how, first, device="cpu", dtype="float32")
    state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in zo.state_dict().items()}
    model = keyhole.load(config("llama"), init="random", seed=3, device="cpu", dtype="float32")
    for new, old in zip(model.engine.homes, zo.model.engine.homes, strict=True):
        new.copy_(old)
    again = keyhole.ZO(model, 1e-3, **how)
    again.load_state_dict(state)
    losses += [float(again.step([ragged(seed=i)])) for i in range(first, 10)]
    again.flush()
    assert losses == whole[0]
    assert all(map(torch.equal, [model.home(t) for t in model.layout.tensors], whole[1]))


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


def test_rows_ahead_need_a_guide() -> None:
    with pytest.raises(UserError, match="guide=N"):
        keyhole.ZO(load("llama"), 1e-3, rank=1).look_ahead([ragged()])


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


@pytest.mark.parametrize("kind", ["rows", "packed", "questions"])
def test_coming_rows_are_those_of_the_next_steps(kind: str) -> None:
    """In the same order, across the end of an epoch, none twice; the position stays."""
    lengths = [3, 5, 2, 4, 6, 3, 2, 5, 4, 3]
    ids = [np.arange(10 * i, 10 * i + n, dtype=np.int32) for i, n in enumerate(lengths)]
    trained = [np.ones(n, dtype=bool) for n in lengths]
    pairs = [[i, i + 1] for i in range(0, 10, 2)]
    about = {"packed": {"rows": pairs}, "questions": {"questions": (pairs, [0, 1, 0, 1, 0])}}.get(kind, {})
    dataset = Dataset(ids, trained, **about)
    loader = Loader(dataset, batch_size=2)
    loader.next_step()
    count, before = len(dataset), loader.position
    coming = [row for one in loader.coming(100, 12) for row in one["input_ids"].tolist()]
    assert loader.position == before

    def content(rows: list[list[int]]) -> list[tuple[int, ...]]:
        return [tuple(x for x in row if x) for row in rows]

    next_rows = [row for _ in range(2 * count) for one in loader.next_step() for row in one["input_ids"].tolist()]
    expected = list(dict.fromkeys(content(next_rows)))
    assert content(coming) == expected and len(set(content(coming))) == len(coming)


def test_coming_rows_need_no_later_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order is computed only if this one's rows are too few: of millions of rows that takes seconds."""
    loader = Loader(Dataset([np.ones(2, dtype=np.int32)] * 9, [np.ones(2, dtype=bool)] * 9), batch_size=3)
    loader.next_step()
    monkeypatch.setattr(loader, "order_of", lambda epoch: pytest.fail("the order of another epoch"))
    assert sum(len(one["input_ids"]) for one in loader.coming(6, 100)) == 6


@pytest.mark.parametrize("kind", ["rows", "packed", "questions"])
def test_batches_of_coming_rows_are_bounded_with_their_padding(kind: str) -> None:
    """One long row among short ones makes small batches of those beside it alone."""
    lengths = [100 if i == 17 else 4 for i in range(60)]
    pairs = [[i, i + 1] for i in range(0, 60, 2)]
    about = {"packed": {"rows": pairs}, "questions": {"questions": (pairs, [0] * 30)}}.get(kind, {})
    ids = [np.ones(n, dtype=np.int32) for n in lengths]
    loader = Loader(Dataset(ids, [np.ones(n, dtype=bool) for n in lengths], **about), batch_size=2)
    coming = loader.coming(60, 160)
    per_row = 2 if kind == "questions" else 1
    for one in coming:
        assert one["input_ids"].numel() <= 160 or len(one["input_ids"]) == 2 * per_row
    assert sum(len(one["input_ids"]) for one in coming) == per_row * len(loader.dataset)
    assert max(len(one["input_ids"]) for one in coming) > 2 * per_row


def planned_bytes(guide: int, **about: Any) -> int:
    model, own = load("llama"), ZOConfig(rank=1, guide=guide)
    work = Workload("zo", 512, 2, own, length=64, **about)
    return device_bytes(model.layout, set(), work, Room(model.formats, 0)).total


def test_the_plan_counts_rows_and_positions_that_there_are() -> None:
    """No more rows than the data have; of the loss over tokens all trained positions, as many as are used."""
    few = planned_bytes(100, rows=100)
    assert few < guide.SOLVED_BYTES  # layers that are solved at once take no more than all of them
    assert few == planned_bytes(10**9, rows=100) < planned_bytes(10**9)
    choice, tokens = planned_bytes(64, chooses=True), planned_bytes(64)
    assert choice == planned_bytes(64, trained=1.0) < planned_bytes(64, trained=8.0) < tokens
    assert tokens == planned_bytes(64, trained=guide.MOST_POSITIONS / 64) == planned_bytes(64, trained=1e6)
    assert planned_bytes(64, chooses=True, trained=300.0) > tokens  # a choice needs all tokens of its candidates


SETTINGS = ["method=zo", "zo.rank=1", "zo.refresh=4", "zo.guide=16", "learning_rate=1e-3", "batch_size=4", "device=cpu"]
SETTINGS += ["model=demo", "train_data=demo", "save_total_limit=5", "eval_data=null", "report_to=none"]


def final(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def test_a_run_is_resumed_from_its_journal_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """11 steps at once; 6 and a resume after the checkpoint of step 4 alone is left; and a replay without data."""
    whole, parts, replayed = (tmp_path / name for name in ("whole", "parts", "replayed"))
    assert main(["train", *SETTINGS, "max_steps=11", f"output_dir={whole}"]) == 0
    assert sorted(p.name for p in (whole / "run" / "directions").iterdir()) == [
        f"{i:06d}.safetensors" for i in range(3)
    ]
    assert main(["train", *SETTINGS, "max_steps=11", "save_steps=4", f"output_dir={parts}"]) == 0
    journal = parts / "run" / "journal"
    assert main(["replay", "demo", str(journal), str(replayed)]) == 0
    expected, found = final(whole), final(replayed)
    assert expected.keys() == found.keys() and all(torch.equal(expected[k], found[k]) for k in expected)
    (parts / "run" / "directions" / "000001.safetensors").unlink()
    assert main(["replay", "demo", str(journal), str(tmp_path / "again")]) == 2
    assert "000001.safetensors cannot be read" in capsys.readouterr().err


def test_damaged_directions_are_found(tmp_path: Path) -> None:
    """A flipped bit anywhere in the file of a period is refused, as are files of another run and of another model."""
    zo = keyhole.ZO(load("llama"), 1e-3, **GUIDED)
    zo.guide.store, zo.guide.run = tmp_path, "one"
    zo.step([ragged()])
    (path,) = tmp_path.iterdir()
    assert torch.equal(zo.guide.read(0), zo.factors.v)
    whole = path.read_bytes()
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(UserError, match=path.name):
            zo.guide.read(0)
    path.write_bytes(whole)
    zo.guide.run = "another"
    with pytest.raises(UserError, match="is of another run"):
        zo.guide.read(0)
    with pytest.raises(UserError, match="not the directions of this model"):
        other = keyhole.ZO(load("llama"), 1e-3, **GUIDED | {"rank": 2})
        other.guide.store = tmp_path
        other.guide.read(0)


def test_directions_that_cannot_be_written_change_nothing(tmp_path: Path) -> None:
    """The step is refused before it begins; with room it is the step that it would have been."""
    expected, _, _ = run(GUIDED, 2, device="cpu")
    zo = keyhole.ZO(keyhole.load(config("llama"), init="random", seed=3, device="cpu"), 1e-3, **GUIDED)
    zo.guide.store = tmp_path / "file" / "directions"
    zo.guide.store.parent.touch()
    with pytest.raises(UserError, match="cannot be written"):
        zo.step([ragged(seed=0)])
    assert zo.step_count == 0 and zo.rows_ahead is not None
    zo.guide.store.parent.unlink()
    assert [float(zo.step([ragged(seed=i)])) for i in range(2)] == expected
    assert torch.equal(zo.guide.read(0), zo.factors.v)


@pytest.mark.parametrize(
    "wrong, said",
    [({"rank": None}, "set rank"), ({"lr": "auto"}, "a number"), ({"guide": 0}, "guide")],
)
def test_what_does_not_go_together_is_refused(wrong: dict[str, Any], said: str) -> None:
    how = {"lr": 1e-3} | GUIDED | wrong
    with pytest.raises(UserError, match=said):
        keyhole.ZO(load("llama"), **how)


def test_several_ranks_are_refused_before_anything_is_loaded() -> None:
    several = SimpleNamespace(several=True, size=2)
    own = {"method": "zo", "gradient_accumulation_steps": 2, "output_dir": "x", "model": "demo"}
    check_ranks(TrainConfig(**own, zo=ZOConfig(rank=1)), several)
    with pytest.raises(UserError, match=r"zo\.guide: several ranks"):
        check_ranks(TrainConfig(**own, zo=ZOConfig(rank=1, guide=8)), several)


def test_it_learns_more_than_random_directions() -> None:
    """The same steps and rate on one batch of questions whose answer shows in the prompt."""

    def loss_after(guide: int | None) -> float:
        model = keyhole.load(config("llama"), init="random", seed=3, device="cpu")
        freeze(model.module, ["embeddings"])
        zo = keyhole.ZO(model, 2e-3, rank=1, refresh=10, guide=guide)
        return sum([float(zo.step([ragged(seed=1)])) for _ in range(30)][-5:]) / 5

    assert loss_after(64) < loss_after(None)
