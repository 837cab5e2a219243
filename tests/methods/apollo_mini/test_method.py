"""APOLLO-Mini against its own formulas, written out; streamed, resumed, and learning."""

import pytest
import torch

import keyhole
from keyhole import ops
from keyhole.methods.apollo_mini.method import GROWTH, APOLLOMini
from tests.matrix import in_every_run
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import close, load, micro_batches, weights
from tests.model.streaming import assert_trained_alike, streamed

LR, REFRESH = 1e-3, 3


def train(opt: APOLLOMini, steps: int, first: int = 0) -> list[float]:
    return [float(opt.step(micro_batches(t, 2))) for t in range(first, first + steps)]


def by_the_book(p: torch.nn.Parameter, state: dict, t: int, start: int, clip: float) -> None:
    """One update of one tensor, as the paper has it."""
    g = p.grad * clip
    r = g
    if g.dim() == 2:
        z = ops.draw_noise(min(g.shape), offset=start, seed=7, step=(t - 1) // REFRESH)
        r = z @ g if g.shape[0] == min(g.shape) else g @ z
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * r
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * r * r
    step = (state["m"] / (1 - 0.9**t)) / ((state["v"] / (1 - 0.999**t)).sqrt() + 1e-8)
    if g.dim() == 2:
        s = step.norm() / r.norm()
        if t > 1:
            s = s * min(1.0, GROWTH * state["length"] / float(s * g.norm()))
        state["length"] = float(s * g.norm())
        step = 128**0.5 * s * g
    p.data.mul_(1 - LR * 0.1).sub_(LR * step)


@in_every_run(lambda name, clip: (name == "llama") == (clip is None))
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_equals_the_textbook(name: str, clip: float | None) -> None:
    """Every tensor within rounding of the formulas, across a change of the sketch's direction, clipped or not."""
    model, module, states = load(name), load(name).module, {}
    starts = {tensor.name: tensor.start for tensor in model.layout.tensors}
    opt = APOLLOMini(model, LR, weight_decay=0.1, weight_decay_on="all", max_grad_norm=clip, refresh=REFRESH, seed=7)
    for t in range(5):
        plain_loss(module, micro_batches(t, 2)).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(module.parameters(), float("inf")))
        for key, p in module.named_parameters():
            factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
            by_the_book(p, states.setdefault(key, {}), t + 1, starts[key], factor)
            p.grad = None
        opt.step(micro_batches(t, 2))
        assert float(opt.metrics()["grad_norm"]) == pytest.approx(norm, rel=1e-4)
    expected = dict(module.named_parameters())
    assert all(close(tensor, expected[key].data, 2e-4) for key, tensor in weights(model).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streamed_equals_resident(dtype: str) -> None:
    """Losses and weights to the bit."""
    resident = load(dtype=dtype)
    models = resident, streamed(resident, slot_count=3)
    assert_trained_alike(models, lambda model: APOLLOMini(model, LR), [micro_batches(t, 2) for t in range(4)])


def test_state_is_that_of_a_vector_per_matrix() -> None:
    """Two numbers per element of the longer side of a matrix, and one more."""
    opt = APOLLOMini(load(), LR)
    train(opt, 1)
    tensor = next(t for t in opt.model.layout.tensors if t.name.endswith("up_proj.weight"))
    assert sum(moment.numel() for moment in opt.update.kept[tensor.name].values()) == 2 * max(tensor.shape) + 1


def test_it_learns() -> None:
    """One batch again and again: the loss falls by half."""
    opt, same = keyhole.APOLLOMini(load(), 5e-3), micro_batches(0, 1)
    losses = [float(opt.step(same)) for _ in range(12)]
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
