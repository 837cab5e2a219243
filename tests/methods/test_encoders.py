"""Every method on encoders with a head for classification: the textbook loop, and streamed == resident."""

from functools import partial
from typing import Any

import pytest
import torch

import keyhole
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from tests.matrix import in_every_run
from tests.methods.test_objective import EPS, OWN, textbook_zo
from tests.model.encoders import batch, config, plain_loss
from tests.model.streaming import assert_trained_alike, streamed

NAMES = ["bert", "roberta", "mpnet"]
STREAMED = [name for name in METHODS if METHODS[name].streams]
SWEEP_ALIKE = ("adalomo", "apollo-mini", "lomo-lora")  # as lomo does


def load(name: str, labels: int = 3, **options: Any) -> keyhole.Model:
    return keyhole.load(config(name, labels), init="random", **{"device": "cpu", **options})


def micro_batches(t: int, labels: int = 3) -> list[dict[str, torch.Tensor]]:
    return [batch(4, 2 * t, labels), batch(2, 2 * t + 1, labels)]


def make(name: str, model: keyhole.Model) -> Method:
    own = OWN.get(name, {}) | ({"d": 8} if name == "lsp" else {})
    return METHODS[name].load()(model, lr=1e-3, **own)


@in_every_run(
    lambda encoder, labels, name: (
        (labels == 3 or name in ("lomo", "adamw"))
        and (encoder == "bert" or name == {"roberta": "lomo", "mpnet": "adam-offload"}[encoder])
    )
)
@pytest.mark.parametrize(("encoder", "labels"), [*((name, 3) for name in NAMES), ("bert", 1)])  # 1: regression
@pytest.mark.parametrize("name", ["lomo", "lsp", "adamw", "adam-offload"])
def test_equals_the_textbook_loop(name: str, encoder: str, labels: int) -> None:
    """Three steps over two micro-batches, with Hugging Face's own loss; lsp in the whole space is AdamW."""
    ours, theirs = load(encoder, labels), load(encoder, labels).module
    how: dict[str, Any] = {"lomo": {}, "lsp": {"d": 256, "eps": EPS}}.get(name, {"eps": EPS})
    method = METHODS[name].load()(ours, lr=1e-2, **how)
    if name == "lomo":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(theirs.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0, eps=EPS)
    for t in range(3):
        loss = plain_loss(theirs, micro_batches(t, labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(method.step(micro_batches(t, labels))) == pytest.approx(loss.item(), rel=1e-5)
    method.flush()
    expected = dict(theirs.named_parameters())
    for key, tensor in ours.named_tensors():
        off = float((tensor - expected[key].data).norm() / expected[key].data.norm().clamp(min=0.1))
        assert off <= 1e-5, f"{key}: {off:.1e}"


@pytest.mark.parametrize("encoder", NAMES)
def test_zo_equals_the_textbook_loop(encoder: str) -> None:
    """Three steps of MeZO with the same noise, perturbing all weights of an ordinary module in place."""
    ours, other = (keyhole.ZO(load(encoder), lr=1e-3, eps=1e-2, seed=7) for _ in range(2))
    book = textbook_zo(other, plain_loss)
    for t in range(3):
        expected = float(book(micro_batches(t)))
        assert float(ours.step(micro_batches(t))) == pytest.approx(expected, rel=1e-5)
    ours.flush()
    found = dict(ours.model.named_tensors())
    for name, tensor in other.model.named_tensors():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


@in_every_run(
    lambda encoder, name: (
        (encoder == "bert" and name not in SWEEP_ALIKE)
        or name == {"roberta": "zo", "mpnet": "adam-offload"}.get(encoder)
    )
)
@pytest.mark.parametrize(
    ("encoder", "name"), [(e, n) for e in NAMES for n in STREAMED if e != "roberta" or n in ("zo", "lomo")]
)
def test_streamed_equals_resident(encoder: str, name: str) -> None:
    """Losses and weights to the bit."""
    resident = load(encoder)
    models = streamed(resident, slot_count=3), resident
    assert_trained_alike(models, partial(make, name), [micro_batches(t) for t in range(2)])


@in_every_run(lambda name: name in ("zo", "lomo", "lsp", "adam-offload", "lora"))
@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns(name: str) -> None:
    """On one batch, the loss falls, with the model's own dropout where the method uses it."""
    model = keyhole.load(config("bert", hidden_dropout_prob=0.1), init="random", device="cpu")
    rates = {"zo": 3e-3, "adalomo": 1e-2, "galore": 1e-2, "lora": 1e-2, "lomo": 0.05, "sgd": 0.05, "lomo-lora": 0.05}
    method, one = METHODS[name].load()(model, lr=rates.get(name, 3e-3), **OWN.get(name, {})), batch(8)
    before = float(model.nll(one)[0].mean())
    for _ in range(6):
        method.step(one)
    assert float(model.nll(one)[0].mean()) < before - 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("name", STREAMED)
def test_gpu_streamed_equals_resident(name: str) -> None:
    """The same on a device."""
    options = {"device": "cuda", "workload": keyhole.Workload(method=name)}
    models = (load("mpnet", placement=placement, **options) for placement in ("resident", "stream"))
    assert_trained_alike(models, partial(make, name), [micro_batches(t) for t in range(4)])
