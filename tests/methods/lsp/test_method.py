"""LSP: AdamW in the whole space, the same steps on GPU and CPU, streamed == resident, and what a subspace changes."""

import math
from functools import partial

import pytest
import torch

import keyhole
from keyhole.methods.lsp.method import LSP
from keyhole.methods.lsp.update import SubspaceUpdates
from keyhole.methods.weight_decay import WeightDecay
from keyhole.ops.lsp.projector import identity_projector
from tests.matrix import in_every_run
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import SIX, close, micro_batches, weights
from tests.methods.lsp.loops import EPS, SMALL, SOON, load, near, torch_adamw, train
from tests.model.decoders import LAYERS, NAMES, config
from tests.model.streaming import assert_trained_alike, streamed, under_random_delays
from tests.traced import IN_PLACE


@in_every_run(lambda name, where, micro: name == "llama" or (name, where) in (("gpt2", "gpu"), ("mixtral", "cpu")))
@pytest.mark.parametrize(
    "name, where, micro, clip",
    [("llama", *how) for how in (("gpu", 1, None), ("gpu", 2, 0.5), ("cpu", 2, None), ("cpu", 1, 0.5))]
    + [("gpt2", "gpu", 2, 0.5), ("qwen2", "cpu", 2, 0.5), ("mixtral", "gpu", 1, None), ("mixtral", "cpu", 1, None)],
)
def test_in_the_whole_space_it_is_adamw(name: str, where: str, micro: int, clip: float | None) -> None:
    """d as large as the matrices: torch's AdamW with weight decay and schedule, accumulated and clipped."""
    model = load(name)
    train(
        LSP(model, d=256, weight_decay=0.1, weight_decay_on="all", max_grad_norm=clip, optimizer_on=where, eps=EPS),
        3,
        micro,
    )
    expected = torch_adamw(name, 3, micro, clip)
    assert all(near(tensor, expected[key]) for key, tensor in weights(model).items())


def test_through_identity_projectors_it_is_adamw() -> None:
    """The same by way of compressing, decompressing and adding up micro-batches in S."""
    model = load()
    opt = LSP(model, d=16, r=1, kind="free", learn=False, optimizer_on="gpu", eps=EPS)
    for target in opt.targets.values():
        if target.p is not None:
            target.take(*(identity_projector(rows) for rows in target.tensor.shape))
    opt.updates = SubspaceUpdates(model, opt.units, set(opt.units), opt.settings, WeightDecay(0.1))
    train(opt, 3, 2)
    expected = torch_adamw("llama", 3, 2, None)
    assert sum(target.p is not None for target in opt.targets.values()) == 7 * LAYERS
    assert all(near(tensor, expected[key]) for key, tensor in weights(model).items())


ODD = ["falcon_alibi", "bloom", "phi3", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba"]  # matrices unlike the six's
CASES = [(name, "gpu", None) for name in NAMES if name not in SIX]
CASES += [(name, "cpu", 0.7) for name in SIX] + [("qwen2", "cpu", None), ("qwen2", "gpu", 0.7)]


@in_every_run(lambda name, where, clip: name in ODD[::2] or (where == "cpu" and clip and name in ("gpt2", "mixtral")))
@pytest.mark.parametrize("name, where, clip", CASES)
def test_streamed_equals_resident(name: str, where: str, clip: float | None) -> None:
    """Losses and weights, to the bit; in six families with two micro-batches and projectors that are learned, and
    change in the last step."""
    resident = load(name)
    steps = [micro_batches(t, 2 if name in SIX else 1) for t in range(3 if name in SIX else 2)]
    how = {"optimizer_on": where, "max_grad_norm": clip, "learn": name in SIX}
    models = resident, streamed(resident, slot_count=2)
    assert_trained_alike(models, lambda model: LSP(model, 1e-2, **how, **SOON), steps)


@in_every_run(lambda kind: kind == "free")
@pytest.mark.parametrize("kind, clip", [("blocks", None), ("free", 0.7)])
def test_host_and_device_take_the_same_steps(kind: str, clip: float | None) -> None:
    """Where the moments are changes no more than rounding; the norm is that of what the optimizer sees."""
    found, norms = [], []
    for where in ("gpu", "cpu"):
        model = load()
        opt = LSP(model, kind=kind, optimizer_on=where, max_grad_norm=clip, fit_steps=5, **SOON)
        train(opt, 3, 2)
        found.append(weights(model))
        norms.append(float(opt.norm))
    assert all(close(found[1][key], found[0][key], 1e-5) for key in found[0])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_accumulation_is_exact() -> None:
    """Two micro-batches move a matrix as their gradient, computed by torch and compressed, does: S is P^T G Q."""
    model, module = load(), load().module
    opt = LSP(model, learn=False, **{**SMALL, "check_freq": 100})
    plain_loss(module, micro_batches(0, 2)).backward()
    kept = {}
    opt.updates.device.deltas_ = lambda given, grad, clip, skip: (
        kept.update({target.name: target.view_in(grad).clone() for target in given}) or grad.zero_()
    )
    opt.step(micro_batches(0, 2))
    grads = {name: p.grad for name, p in module.named_parameters()}
    for target in opt.targets.values():
        grad = grads[target.name]
        if target.p is not None:
            grad = target.p.dense_Rd().T @ grad @ target.q.dense_Rd()
        torch.testing.assert_close(kept[target.name], grad, rtol=1e-4, atol=1e-6)


def test_good_projectors_stay_and_bad_ones_go() -> None:
    """At a check only matrices above alpha get new projectors, and a sample of all is looked at."""
    for alpha, replaced in ((1.0, False), (1e-6, True)):
        opt = LSP(load(), **{**SOON, "alpha": alpha, "check_share": 0.5})
        train(opt, 3)
        generations = [target.generation for target in opt.targets.values() if target.p is not None]
        assert len(opt.check.biases) == math.ceil(7 * LAYERS / 2) and set(generations) == ({1, 2} if replaced else {1})
        assert 0 < float(opt.metrics()["bias"]) < 1


@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_the_others_can_be_frozen(where: str) -> None:
    """Matrices of blocks move, nothing else does, and that is said."""
    model = load(dtype="bfloat16")
    before = weights(model)
    opt = LSP(model, 1e-2, others="frozen", optimizer_on=where, **SMALL)
    train(opt, 2)
    for name, tensor in weights(model).items():
        assert torch.equal(tensor, before[name]) != (".layers." in name and "norm" not in name), name
    assert any("not trained: " in line for line in opt.describe())


def test_what_was_decided_is_said() -> None:
    """A d that is more than a side has, stacks of experts, and what is trained as it is."""
    lines = LSP(load(), d=48, r=4).describe()
    assert any(f"{7 * LAYERS} matrices has" in line for line in lines) and any("plain Adam" in line for line in lines)
    assert any("experts" in line for line in LSP(load("mixtral"), **SMALL).describe())


@pytest.mark.matrix
def test_compiled_blocks() -> None:
    """Traced by torch.compile (no compiler here): the steps of plain blocks within rounding, also accumulated."""
    for micro in (1, 2):
        found = []
        for compiled in (False, IN_PLACE):
            model = load()
            train(LSP(model, compile=compiled, learn=False, **SMALL), 2, micro)
            found.append(weights(model))
        assert all(close(found[1][key], found[0][key], 1e-4) for key in found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["gpu", "cpu"])
@pytest.mark.parametrize("kind", ["blocks", "free"])
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_streamed_equals_resident_on_a_gpu(name: str, clip: float | None, kind: str, where: str) -> None:
    models = under_random_delays(partial(keyhole.load, config(name), init="random", device="cuda", dtype="bfloat16"))
    how = {"kind": kind, "optimizer_on": where, "max_grad_norm": clip, "fit_steps": 5}
    assert_trained_alike(
        models, lambda model: LSP(model, 1e-2, **how, **SMALL), [micro_batches(t, 2) for t in range(5)]
    )
