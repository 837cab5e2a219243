"""Every estimator against a plain loop with the same z; streamed, resumed, replayed, accumulated: the same bits."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import keyhole
from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.workload import Room, Workload
from keyhole.methods.zo.memory import device_bytes
from keyhole.methods.zo.traits import DEFAULTS, ZOConfig
from keyhole.model.batch import to_device
from keyhole.model.forward.memory import ForwardBytes
from keyhole.model.weights.format import Wire
from keyhole.ops.loss import RunningNLL
from tests.methods.zo.loops import EPS, SEED, check_one_visit, equal, train, weights
from tests.model.decoders import batch, load
from tests.model.streaming import streamed

DECAY = 0.1
CANDIDATES = {"question": torch.tensor([0, 0, 1, 1]), "answer": torch.tensor([1, 0, 0, 1])}

Loss = Callable[[float, torch.Tensor], torch.Tensor]


def step_batch(t: int, candidates: bool = False, length: int = 10) -> dict[str, torch.Tensor]:
    made = dict(batch(seed=t, rows=4, length=length))
    return made | CANDIDATES if candidates else made


def mezo(loss: Loss, z: list[torch.Tensor]) -> list[torch.Tensor]:
    return [(loss(EPS, z_i) - loss(-EPS, z_i)) / (2 * EPS) / len(z) for z_i in z]


def fzoo(loss: Loss, z: list[torch.Tensor]) -> list[torch.Tensor]:
    clean, moved = loss(0.0, z[0]), torch.stack([loss(EPS, z_i) for z_i in z])
    return list((moved - clean) / (len(z) * moved.std()))


RULES = {"mezo": mezo, "fzoo": fzoo}


@torch.no_grad()
def plain_loop(
    model: keyhole.Model, rule: Callable, steps: list[list], directions: int, decay: float, distribution: str
) -> None:
    """All weights moved, the model called, the weights put back, the update."""
    for t, batches in enumerate(steps):
        sent = [to_device(one, model.device) for one in batches]
        clean = {p.name: p.param.data.clone() for p in model.layout.tensors}
        how = {"offset": 0, "seed": SEED, "step": t, "distribution": distribution}
        z = [ops.draw_noise(model.layout.numel, direction=i, **how) for i in range(directions)]

        def loss(eps: float, z_i: torch.Tensor, clean: dict = clean, sent: list = sent) -> torch.Tensor:
            for p in model.layout.tensors:
                p.param.data.copy_(clean[p.name] + eps * z_i[p.start : p.stop].view(p.shape))
            sums = []
            for b in sent:
                running = RunningNLL(b.target_N)
                running.add(model.head.logits(model.hidden(b)), 0)
                sums.append(b.loss.total(running.nll_N()))
            return torch.stack(sums).sum() / sum(b.loss.count for b in sent)

        c, lr = rule(loss, z), torch.tensor(1e-3 * (1 - t / 40))
        for p in model.layout.tensors:
            parts = [c_i * z_i[p.start : p.stop] for c_i, z_i in zip(c, z, strict=True)]
            u = sum(parts[1:], parts[0]).view(p.shape)
            p.param.data.copy_(clean[p.name] - lr * (u + decay * clean[p.name]))


def options(estimator: str, **more: Any) -> dict[str, Any]:
    return {"estimator": estimator, "directions": 3, "weight_decay": DECAY, "weight_decay_on": "all"} | more


@pytest.mark.parametrize(
    "estimator, name, directions, decay, micro, candidates",
    [(estimator, "llama", 3, DECAY, 1, candidates) for estimator in RULES for candidates in (False, True)]
    + [("mezo", "llama", 1, 0.0, 1, False), ("mezo", "llama", 2, 0.1, 2, False), ("mezo", "opt", 3, 0.1, 1, False)],
)
def test_equals_the_plain_loop(
    estimator: str, name: str, directions: int, decay: float, micro: int, candidates: bool
) -> None:
    """Four steps in fp32 give its weights to the bit, with directions, decay, a schedule, accumulation, either loss."""
    book, ours = load(name), load(name)
    steps = [[step_batch(micro * t + k, candidates, 10 + k) for k in range(micro)] for t in range(4)]
    plain_loop(book, RULES[estimator], steps, directions, decay, DEFAULTS[estimator].distribution)
    how = options(estimator, directions=directions, weight_decay=decay)
    opt = keyhole.ZO(ours, eps=EPS, seed=SEED, **how)
    for t, batches in enumerate(steps):
        opt.lr = 1e-3 * (1 - t / 40)
        opt.step(batches)
    opt.flush()
    assert equal(weights(book), weights(ours))


@pytest.mark.parametrize("directions", [2, 3, 4])
def test_streamed_equals_resident(directions: int) -> None:
    """Losses and weights are the same bits, and a unit crosses the link once per step."""
    resident = load()
    model, how = streamed(resident, chaos=random.Random(0)), options("fzoo", directions=directions)
    batches = [step_batch(0), step_batch(1)]
    assert train(model, 3, batches, **how) == train(resident, 3, batches, **how)
    assert equal(weights(resident), weights(model))
    check_one_visit(model, keyhole.ZO(model, 1e-3, **how), batches)


@pytest.mark.parametrize("estimator", RULES)
def test_replay_is_exact(estimator: str) -> None:
    """The updates alone give the weights, made by a method that knows none of the estimator."""
    whole, replayed = load(), load()
    opt = keyhole.ZO(whole, 1e-3, eps=EPS, seed=SEED, **options(estimator))
    updates = []
    for t in range(5):
        opt.step(step_batch(t))
        updates.append(opt.latest)
    opt.flush()
    noise = {"distribution": DEFAULTS[estimator].distribution, "weight_decay_on": "all"}
    keyhole.ZO(replayed, directions=3, seed=SEED, **noise).replay(updates)
    assert equal(weights(whole), weights(replayed))


@pytest.mark.parametrize("estimator", RULES)
def test_a_non_finite_loss_changes_nothing(estimator: str) -> None:
    model = load()
    with torch.no_grad():
        next(t for t in model.layout.tensors if "lm_head" in t.name).param.data.fill_(3e38)
    before, opt = weights(model), keyhole.ZO(model, 1e-2, eps=EPS, **options(estimator))
    loss = opt.step(batch())
    opt.flush()
    assert not torch.isfinite(loss) and equal(before, weights(model))


@pytest.mark.parametrize(
    "bad, match", [({"estimator": "grzo"}, r"expected mezo \| fzoo"),
                   ({"estimator": "fzoo", "directions": 1}, "zo.directions: found 1; fzoo needs 2 at least"),
                   ({"estimator": "fzoo", "clip": 1.0}, "clip"), ({"fold": False}, "zo.fold: has no"),
                   ({"eps": 1e30}, r"zo.eps: found 1e\+30, expected number >= 1e-08 and <= 1"),
                   ({"eps": 1e-40}, "zo.eps")],
)  # fmt: skip
def test_what_an_estimator_cannot_do_is_refused(bad: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        keyhole.ZO(load(), **bad)


def test_the_plan_knows_the_passes() -> None:
    """Hidden states and commons of what a step measures; two perturbed units whatever it is."""
    layout, room = load().layout, Room(Wire(torch.float32, None), workspace_bytes=1000)

    def planned(estimator: str, q: int) -> ForwardBytes:
        own = ZOConfig(estimator=estimator, directions=q)
        return device_bytes(layout, set(), Workload("zo", 64, own.passes, own), room)

    pair, seven = planned("mezo", 1), planned("fzoo", 7)
    common, four = 2 * 4 * layout.common.numel, planned("mezo", 4)
    assert seven.perturbed - pair.perturbed == four.perturbed - pair.perturbed == 3 * common
    assert seven.activations == four.activations > pair.activations


def test_looks_are_as_planned_and_said() -> None:
    """Defaults differ from estimator to estimator, so a run says which it took."""
    rule = "estimator: fzoo, 7 directions (rademacher), eps 0.001: 8 forward passes per step"
    assert keyhole.ZO(load(), estimator="fzoo").describe()[0].startswith(rule)
    for estimator, pairs in (("mezo", 3), ("fzoo", 2)):
        opt = keyhole.ZO(load(), estimator=estimator, directions=3)
        assert opt.directions.commons.shape[0] == pairs == DEFAULTS[estimator].pairs(3) == len(opt.estimator.pairs)
        assert DEFAULTS[estimator].passes(3) == sum(pair.looks for pair in opt.estimator.pairs)
