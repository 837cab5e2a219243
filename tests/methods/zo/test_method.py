"""Zeroth-order steps against the textbook, and at the edges: frozen tensors, losses that are not finite, clipping."""

import gc
from functools import lru_cache
from typing import Any

import pytest
import torch

import keyhole
from keyhole import ops
from keyhole.errors import UserError
from keyhole.model.batch import to_device
from keyhole.ops.loss import RunningNLL
from tests.methods.zo.loops import EPS, SEED, equal, load, train, weights
from tests.model.decoders import batch


@torch.no_grad()
def textbook(model: keyhole.Model, steps: int, q: int, weight_decay: float, micro: int) -> None:
    """MeZO as in the textbook: perturb all weights, call the model, put them back, update."""
    params = model.layout.tensors

    def z(tensor: Any, t: int, i: int) -> torch.Tensor:
        return flat_z(t, i)[tensor.start : tensor.stop].view(tensor.shape)

    @lru_cache(maxsize=q)
    def flat_z(t: int, i: int) -> torch.Tensor:
        return ops.draw_noise(model.layout.numel, offset=0, seed=SEED, step=t, direction=i)

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
    "name, q, weight_decay, micro", [("llama", 1, 0.0, 1), ("llama", 2, 0.1, 2), ("opt", 3, 0.1, 1)]
)
def test_equals_the_textbook_loop(name: str, q: int, weight_decay: float, micro: int) -> None:
    """Four steps in fp32 give the textbook's weights to the bit, with directions, decay, a schedule, accumulation."""
    book, ours = load(name), load(name)
    textbook(book, 4, q, weight_decay, micro)
    opt = keyhole.ZO(ours, eps=EPS, seed=SEED, directions=q, weight_decay=weight_decay, weight_decay_on="all")
    for t in range(4):
        opt.lr = 1e-3 * (1 - t / 40)
        opt.step([batch(seed=micro * t + k, length=10 + k) for k in range(micro)])
    opt.flush()
    assert equal(weights(book), weights(ours))


def test_it_learns() -> None:
    """On one batch, the loss falls."""
    model = load()
    losses = train(model, 10, [batch()], lr=1e-2, directions=2, distribution="rademacher")
    assert losses[-1] < losses[0] - 0.1


def test_clip_bounds_the_projected_gradient() -> None:
    """|g| is at most `clip`, and the update is that of the clipped g."""
    model = load()
    opt = keyhole.ZO(model, lr=1e-3, eps=EPS, clip=1e-3)
    opt.step(batch())
    assert opt.metrics()["projected_grad"] == pytest.approx(1e-3)


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


@pytest.mark.parametrize("lr", [float("nan"), -1.0, float("inf"), "1e-3"])
def test_what_is_no_learning_rate_is_refused(lr: Any) -> None:
    for method in (keyhole.ZO, keyhole.LOMO, keyhole.LSP, keyhole.AdamOffload):
        with pytest.raises(UserError, match="lr: .* is no learning rate"):
            method(load(), lr)


@pytest.mark.parametrize("wire", [None, "fp8"])
def test_a_second_method_finds_the_memory_of_the_first_free(wire: str | None) -> None:
    """Buffers of a method that is gone are not kept alive by what the model remembers of them."""
    model = load("opt", placement="stream", wire=wire)
    first = keyhole.ZO(model, 1e-3)
    first.step(batch())
    at = first.directions.copies[0].untyped_storage().data_ptr()
    del first
    second = keyhole.ZO(model, 1e-3)
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"]
    views = [x for x in tensors if x.untyped_storage().data_ptr() == at]
    assert all(any(view is copy for copy in second.directions.copies) for view in views)
