"""Directions that predict the error: ridge regression, principal components, and those of the plain model."""

from typing import Any

import pytest
import torch
import transformers as hf

import keyhole
from keyhole.methods.zo.low_rank import error_directions, guide, head_errors
from keyhole.methods.zo.low_rank.error_directions import RIDGE, predictors, principal_errors
from keyhole.model.forward.evaluation import swept
from tests.matrix import in_every_run
from tests.methods.zo.loops import load
from tests.model import encoders
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
    zo.guide.renew([with_two_answers()])
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


@in_every_run(lambda kept, pieces: pieces == 2 or kept == 0.5)
@pytest.mark.parametrize("kept, sweeps", [(1.0, 1), (0.75, 1), (0.5, 2), (0.0, 2)])
@pytest.mark.parametrize("pieces", [1, 2])
def test_directions_are_those_of_the_plain_model(
    pieces: int, kept: float, sweeps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer, in one pass or two, up to the sign; from inputs that are kept (0.75 of their bytes: if those that
    several layers read count once), and from those of a second sweep, of which some were kept before or none."""
    one = with_two_answers()
    model = keyhole.load(config("llama"), init="random", seed=3, device="cpu")
    zo = keyhole.ZO(model, 1e-3, **GUIDED)
    inputs = sum(matrix.inputs for matrix in zo.factors.parts.matrices)
    monkeypatch.setattr(guide, "KEPT_BYTES", int(kept * 4 * 24 * inputs))
    made = []
    for module in (guide, head_errors):
        monkeypatch.setattr(module, "swept", lambda *args, **how: made.append(how) or swept(*args, **how))
    half = {name: x[:24] for name, x in one.items()}, {name: x[24:] for name, x in one.items()}
    half[1]["question"] = half[0]["question"].clone()
    zo.guide.renew([one] if pieces == 1 else list(half))
    assert len(made) == sweeps
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
    zo.guide.renew([one])
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


CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "no pooler": ("roberta", {}),
    "two labels": ("mpnet", {"labels": 2}),
    "a number": ("bert", {"labels": 1}),
    "the last token": ("llama", {}),
}


@in_every_run(lambda name, pieces: (pieces == 1) == (name in ("no pooler", "a number")))
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_directions_of_classifiers(name: str, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """V of every layer from hooks and autograd on the module of Transformers: the inputs and the error at the tokens
    that the head reads, in one pass or several."""
    monkeypatch.setattr(error_directions, "POWER_STEPS", 400)
    monkeypatch.setattr(error_directions, "SOLVER_STEPS", 40)
    family, changes = CLASSIFIERS[name]
    made = encoders.config(family, **changes)
    model, plain = (keyhole.load(made, init="random", seed=3, device="cpu", dtype="float32") for _ in range(2))
    batches = [encoders.batch(rows=24 // pieces, seed=i, labels=made.num_labels) for i in range(pieces)]
    zo = keyhole.ZO(model, 1e-3, **GUIDED)
    zo.guide.renew(batches)
    inputs, errors = zip(*(read_by_plain_head(plain, one) for one in batches), strict=True)
    d_NH = torch.cat(errors)
    assert len(d_NH) == 24
    y_N = d_NH @ torch.linalg.svd(d_NH, full_matrices=False)[2][0]
    for matrix in zo.factors.parts.matrices:
        (found_I,) = zo.factors.rows(zo.factors.v, matrix.v)
        expected_I = solved(torch.cat([of_batch[matrix.tensor.name] for of_batch in inputs]), y_N)
        expected_I = expected_I * torch.sign(expected_I @ found_I)
        assert float((found_I - expected_I).norm() / expected_I.norm()) < 1e-3, matrix.tensor.name


def read_by_plain_head(model: keyhole.Model, one: dict[str, torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
    """By the name of a weight, its inputs at the tokens that the head reads: those where the output of the last block
    has a gradient; and this gradient."""
    module, inputs, outputs = model.module, {}, []
    handles = [
        layer.register_forward_pre_hook(lambda _, args, n=name: inputs.update({f"{n}.weight": args[0]}))
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]

    def keep(_: Any, args: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])
        outputs[-1].retain_grad()

    handles.append(model.blocks[-1].register_forward_hook(keep))
    with torch.enable_grad():
        (encoders.plain_loss(module, [one]) * len(one["labels"])).backward()
    for handle in handles:
        handle.remove()
    read = outputs[0].grad.any(dim=-1)
    return {n: x.detach()[read] for n, x in inputs.items() if x.shape[:-1] == read.shape}, outputs[0].grad[read]


def test_a_head_that_reads_all_tokens_has_some_at_equal_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """ModernBERT with mean pooling."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    made = hf.ModernBertConfig(**size, vocab_size=99, pad_token_id=1, classifier_pooling="mean", num_labels=2)
    made.architectures = ["ModernBertForSequenceClassification"]
    for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        setattr(made, name, 2)
    model = keyhole.load(made, init="random", seed=3, device="cpu", dtype="float32")
    sent = model.send([encoders.batch(rows=5, seed=seed, labels=2) for seed in (1, 2)])
    tokens = [int(batch.inputs["attention_mask"].sum()) for batch in sent]
    with torch.no_grad():
        every, errors = head_errors.class_errors(model, sent, 10_000)
        some, fewer = head_errors.class_errors(model, sent, 20)
    assert list(map(len, every)) == tokens
    for all_N, d_NH, at_N, part in zip(every, errors, some, fewer, strict=True):
        distance = -(-len(all_N) // 10)
        assert torch.equal(at_N, all_N[::distance]) and torch.equal(part, d_NH[::distance])
