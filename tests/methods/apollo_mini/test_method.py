"""APOLLO-Mini against its own formulas, written out; streamed, resumed, and learning."""

import pytest
import torch

import keyhole
from keyhole import ops
from keyhole.methods.apollo_mini.memory import PAGING
from keyhole.methods.apollo_mini.method import APOLLOMini
from tests.matrix import in_every_run
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import close, load, micro_batches, weights
from tests.model.streaming import assert_trained_alike, streamed

LR, REFRESH, EPS = 1e-3, 3, 1e-6


def train(opt: APOLLOMini, steps: int, first: int = 0) -> list[float]:
    return [float(opt.step(micro_batches(t, 2))) for t in range(first, first + steps)]


def by_the_book(p: torch.Tensor, g: torch.Tensor, state: dict, start: int, matrix: bool) -> None:
    """One update of one tensor as published: the limiter before the correction of the means, and AdamW where there is
    no matrix of a block."""
    t = state["t"] = state.get("t", 0) + 1
    r = g
    if matrix:
        tall = g.shape[0] >= g.shape[1]
        z = ops.draw_noise(min(g.shape), offset=start, seed=7, step=(t - 1) // REFRESH)
        r = g @ z if tall else z @ g
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * r
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * r * r
    step = state["m"] / (state["v"].sqrt() + EPS)
    if matrix:
        step = g * (step.norm() / (r.norm() + 1e-8))
        if "length" in state:
            step = step / (max(float(step.norm()) / (state["length"] + 1e-8), 1.01) / 1.01)
        state["length"] = float(step.norm())
        step = 128**0.5 * step
    p.sub_(LR * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * step + LR * 0.1 * p)


@in_every_run(lambda name, clip: (name == "mixtral") != (clip is None))
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "opt"])
def test_equals_the_textbook(name: str, clip: float | None) -> None:
    """Every tensor within rounding of the formulas, across a change of the sketch's direction, clipped or not; each
    expert of a stack by itself, also of a small one that is computed whole."""
    model, module, states = load(name), load(name).module, {}
    own = {tensor.name: tensor for tensor in model.layout.tensors}
    opt = APOLLOMini(
        model, LR, weight_decay=0.1, weight_decay_on="all", max_grad_norm=clip, refresh=REFRESH, seed=7, eps=EPS
    )
    for t in range(6):
        plain_loss(module, micro_batches(t, 2)).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(module.parameters(), float("inf")))
        for key, p in module.named_parameters():
            g, p.grad = p.grad * (1.0 if clip is None else min(1.0, clip / (norm + 1e-6))), None
            each = zip(p.data, g, strict=True) if own[key].stacked else [(p.data, g)]
            for e, (one, grad) in enumerate(each):
                start = own[key].start + e * one.numel()
                by_the_book(one, grad, states.setdefault((key, e), {}), start, own[key].in_matrices)
        opt.step(micro_batches(t, 2))
        assert float(opt.metrics()["grad_norm"]) == pytest.approx(norm, rel=1e-4)
    expected = dict(module.named_parameters())
    assert all(close(tensor, expected[key].data, 2e-4) for key, tensor in weights(model).items())


@pytest.mark.parametrize("name, dtype", [("llama", "float32"), ("gpt2", "bfloat16"), ("mixtral", "bfloat16")])
def test_streamed_equals_resident(name: str, dtype: str) -> None:
    """Losses and weights to the bit, in whole blocks and in smaller units, with a small stack of experts."""
    resident = load(name, dtype=dtype)
    models = resident, streamed(resident, slot_count=3), streamed(resident, slot_count=12, max_unit_numel=4000)
    assert_trained_alike(models, lambda model: APOLLOMini(model, LR), [micro_batches(t, 2) for t in range(4)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_is_two_vectors_per_matrix_and_two_moments_of_the_rest(dtype: str) -> None:
    """On the device two numbers per element of the longer side and one more; in host memory, as planned, two for each
    element of embedding, head and vectors, in the format of the model. An expert has its own."""
    opt = APOLLOMini(load("mixtral", dtype=dtype), LR)
    train(opt, 1)
    for t in opt.model.layout.tensors:
        kept = [opt.update.kept[t.expert(e).name] for e in range(t.stacked)] or [opt.update.kept[t.name]]
        for own in kept:
            assert sum(one.numel() for one in own.values()) == (2 * max(t.shape[-2:]) + 1 if t.in_matrices else 0)
    rest = sum(t.shape.numel() for t in opt.model.layout.tensors if not t.in_matrices)
    size = opt.model.dtype.itemsize
    assert 2 * size * rest <= opt.update.pages.bytes < 2 * size * rest + 4000
    assert opt.update.pages.bytes == PAGING.host_state(opt.model.layout, set(), size)[1]


def test_it_learns() -> None:
    """One batch again and again: the loss falls by half."""
    opt, same = keyhole.APOLLOMini(load(), 5e-3), micro_batches(0, 1)
    losses = [float(opt.step(same)) for _ in range(20)]
    assert losses[-1] < losses[0] / 2


def test_a_tensor_that_is_trained_later_begins_as_in_a_new_run() -> None:
    """Its moments are corrected for their own start, not for that of the run; also after a stop in between."""
    late = ("model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    model, fresh = load(), load()
    opt = APOLLOMini(model, LR)
    params = dict(model.module.named_parameters())
    for name in late:
        params[name].requires_grad_(False)
    train(opt, 3)
    for name in late:
        params[name].requires_grad_(True)
    with torch.no_grad():
        for name, param in fresh.module.named_parameters():
            param.copy_(params[name])
    new = APOLLOMini(fresh, LR)
    assert train(opt, 1, first=3) == train(new, 1, first=3)
    assert all(torch.equal(weights(model)[name], weights(fresh)[name]) for name in late)
    stopped = load()
    stopped.module.load_state_dict(model.module.state_dict())
    again = APOLLOMini(stopped, LR)
    again.load_state_dict(opt.state_dict())
    for each in (opt, again):
        train(each, 1, first=4)
    assert all(torch.equal(tensor, weights(stopped)[key]) for key, tensor in weights(model).items())
