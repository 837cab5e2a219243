"""Every method trained by candidates: the update of plain torch on the same loss, resident and streamed."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import keyhole
from keyhole import ops
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.methods.baselines.first_order import TorchMethod
from keyhole.methods.zo.method import ZO
from keyhole.model.structure import layout as layout_module
from tests.matrix import in_every_run
from tests.model.candidates import candidate_batch, plain_candidates_loss
from tests.model.decoders import load
from tests.model.streaming import assert_trained_alike, streamed

EPS = 1e-3  # of Adam: some biases have no gradient but rounding, which it would blow up
OWN: dict[str, dict[str, Any]] = {  # settings for a model of width 32
    "zo": {"eps": 1e-2, "seed": 7, "directions": 2},
    "lomo": {"max_grad_norm": 0.5},
    "lomo-lora": {"r": 4, "max_grad_norm": 0.5},
    "lsp": {"d": 16, "r": 4, "check_freq": 2, "alpha": 0.05, "eps": EPS},
    "adam-offload": {"eps": EPS},
    "muon": {"eps": EPS, "moments": "float32"},
    "apollo-mini": {"eps": EPS},
    "adamw": {"eps": EPS},
    "galore": {"rank": 4, "eps": EPS},
}
STREAMED = [name for name in METHODS if METHODS[name].streams]


def make(name: str, model: keyhole.Model, **options: Any) -> Method:
    method = METHODS[name].load()(model, lr=1e-3, **OWN.get(name, {}) | options)
    for group in getattr(method, "optimizer", torch.optim.SGD([torch.zeros(1)])).param_groups:
        group["eps"] = EPS
    return method


def micro_batches(t: int) -> list[dict[str, torch.Tensor]]:
    """Two, with different numbers of questions and of candidates."""
    return [candidate_batch([2, 3], seed=2 * t), candidate_batch([4], seed=2 * t + 1)]


def trained(model: keyhole.Model) -> dict[str, torch.Tensor]:
    """The model's weights, and adapters beside them."""
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def differentiated_by_autograd(method: Any) -> Callable[[list], torch.Tensor]:
    """A step of the method whose gradients come from plain autograd over the module's full logits."""
    model, current = method.model, []
    if isinstance(method, TorchMethod):

        def step(batches: list) -> torch.Tensor:
            loss = plain_candidates_loss(model.module, batches)
            loss.backward()
            method.optimizer.step()
            method.optimizer.zero_grad()
            return loss.detach()

        return step

    def forward(sent: list, *_: Any) -> torch.Tensor:
        current[:] = [plain_candidates_loss(model.module, given[0])]
        return current[0].detach()

    def reverse(sink: Any, loss_scale: float = 1.0, last: bool = True) -> None:
        method.reverse.walk(current[0] * loss_scale, sink, last)

    def walked_step(batches: list) -> torch.Tensor:
        given[:] = [batches]
        method.flush()  # the module computes with the weights at home
        return method.step(batches)

    given: list[list] = []
    method.reverse.forward, method.reverse.reverse = forward, reverse
    method.reverse.sweep = lambda *args: nullcontext()
    return walked_step


def textbook_zo(method: ZO, loss: Callable = plain_candidates_loss) -> Callable[[list], torch.Tensor]:
    """MeZO's ten lines, with the same noise."""
    model, q, step_count = method.model, method.settings.count, 0

    @torch.no_grad()
    def step(batches: list) -> torch.Tensor:
        nonlocal step_count
        tensors = model.layout.tensors
        clean, change, losses = [t.param.data.clone() for t in tensors], [0.0] * len(tensors), []
        for i in range(q):
            flat = ops.draw_noise(model.layout.numel, offset=0, seed=7, step=step_count, direction=i)
            z = [flat[t.start : t.stop].view(t.shape) for t in tensors]
            for sign in (1, -1):
                for t, w, noise in zip(tensors, clean, z, strict=True):
                    t.param.data.copy_(w + sign * method.directions.eps * noise)
                losses.append(loss(model.module, batches))
            g = (losses[-2] - losses[-1]) / (2 * method.directions.eps)
            change = [c + g / q * noise for c, noise in zip(change, z, strict=True)]
        for t, w, c in zip(tensors, clean, change, strict=True):
            t.param.data.copy_(w - method.lr * c)
        step_count += 1
        return torch.stack(losses).mean()

    return step


@in_every_run(lambda name, decoder: decoder == "qwen2" or name in ("zo", "lomo"))
@pytest.mark.parametrize("decoder", ["llama", "qwen2"])  # untied, tied
@pytest.mark.parametrize("name", METHODS)
def test_equals_plain_torch(name: str, decoder: str) -> None:
    """Two steps over micro-batches with different numbers of questions: losses and weights."""
    ours, theirs = load(decoder), load(decoder)
    whole = {"learn": False} if name == "lsp" else {}  # its projectors are fitted to one micro-batch, not to the sum
    method, other = make(name, ours, **whole), make(name, theirs, **whole)
    book = textbook_zo(other) if isinstance(other, ZO) else differentiated_by_autograd(other)
    for t in range(2):
        expected = float(book(micro_batches(t)))
        assert float(method.step(micro_batches(t))) == pytest.approx(expected, abs=1e-6)
    method.flush()
    if not isinstance(other, ZO):
        other.flush()
    found = trained(ours)
    for key, tensor in trained(theirs).items():
        off = float((found[key] - tensor).norm() / tensor.norm().clamp(min=0.1))
        assert off <= (1e-3 if name == "muon" else 1e-6), f"{key}: {off:.1e}"  # Newton-Schulz is in bfloat16


@in_every_run(lambda name: name in ("zo", "lomo", "lora"))
@pytest.mark.parametrize("name", STREAMED)
def test_streamed_equals_resident(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and weights to the bit, where the head is visited in three chunks."""
    monkeypatch.setattr(layout_module, "CHUNK_ROWS", 40)
    resident = load("qwen2")
    models = streamed(resident, slot_count=3), resident
    assert_trained_alike(models, partial(make, name), [micro_batches(t) for t in range(2)])


@pytest.mark.gpu
@pytest.mark.parametrize("name", STREAMED)
def test_gpu_streamed_equals_resident(name: str) -> None:
    """The same on a device, twice in a row: nothing is added up in an order of chance."""
    options = {"device": "cuda", "workload": keyhole.Workload(method=name)}
    models = (load("qwen2", placement=placement, **options) for placement in ("resident", "stream", "resident"))
    assert_trained_alike(models, partial(make, name), [micro_batches(t) for t in range(4)])
