"""The rate that losses alone tell: known surfaces give the known answer."""

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.zo import rate_search
from keyhole.methods.zo.estimators import ESTIMATORS
from keyhole.methods.zo.rate_search import CAUTION, LEAST_SHARE, REACH, chosen_rate, rate_share
from keyhole.methods.zo.traits import DEFAULTS
from keyhole.model.batch import to_device
from tests.matrix import in_every_run
from tests.methods.zo.loops import EPS, equal, load, weights
from tests.model.decoders import batch


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_ideal_rate_falls_fastest(name: str) -> None:
    """On a quadratic bowl, a step at the ideal rate lowers the loss more, on average, than at a third or thrice it."""
    d, q, eps, trials = 400, 7, 1e-4, 300
    estimator, generator = ESTIMATORS[name](q, eps, None), torch.Generator().manual_seed(0)
    w = torch.randn(d, generator=generator, dtype=torch.float64)
    power, curvature = float(w @ w), float(d)  # of slopes along z, and of z^T H z with H = 1
    best = estimator.ideal_rate(power, power, curvature)
    falls = dict.fromkeys((best / 3, best, best * 3), 0.0)
    for _ in range(trials):
        z = torch.randn(q, d, generator=generator, dtype=torch.float64)
        if name == "fzoo":
            z = z.sign()

        def loss(x: torch.Tensor) -> torch.Tensor:
            return x @ x / 2

        looks = []
        for pair in estimator.pairs:
            looks.append(loss(w + eps * z[pair.direction]))
            if pair.beside == "minus":
                looks.append(loss(w - eps * z[pair.direction]))
            elif pair.beside == "next":
                looks.append(loss(w + eps * z[pair.direction + 1]))
            elif pair.beside == "clean":
                looks.append(loss(w))
        measured = torch.stack(looks)
        _, c = estimator.estimate(measured)
        for rate in falls:
            falls[rate] += float(loss(w) - loss(w - rate * (c @ z))) / trials
    assert falls[best] > falls[best / 3] > 0 and falls[best] > falls[best * 3]


def test_noise_lowers_the_rate_to_a_floor() -> None:
    """Where halves disagree the signal is small, but never taken for nothing; agreement above 1 is chance."""
    estimator = ESTIMATORS["mezo"](1, 1e-3, None)
    rates = [chosen_rate(estimator, product, 4.0, 1e8)[0] for product in (8.0, 4.0, 2.0, -3.0)]
    expected = [CAUTION * share / 1e4 for share in (1.0, 1.0, 0.5, LEAST_SHARE)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_step_goes_far_beyond_what_was_measured(name: str) -> None:
    """On a surface that seems flat, an update at the chosen rate moves a weight by REACH eps, root mean square; the
    reason says so."""
    q, eps, slope, generator = 7, 1e-3, 3.0, torch.Generator().manual_seed(0)
    estimator = ESTIMATORS[name](q, eps, None)
    rate, why = chosen_rate(estimator, slope**2, slope**2, 1e-8)
    g = slope * torch.randn(4000, q, generator=generator, dtype=torch.float64)
    if name == "fzoo":
        looks = torch.cat([eps * g[:, :1], torch.zeros(4000, 1), eps * g[:, 1:]], dim=1)
    else:
        looks = eps * torch.stack([g, -g], dim=2).flatten(1)
    found = [estimator.estimate(one)[1].square().sum() for one in looks]
    moved = rate * float(torch.stack(found).mean()) ** 0.5  # z has variance 1
    assert 0.8 * REACH * eps < moved <= 1.1 * REACH * eps and "8 eps" in why


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_low_rank_bends_more_where_it_is_steep(rank: int) -> None:
    """E[g^2 z^T z] over directions of 4 x 4 is 18 |G|^2 if they are dense and 18 (1 + 1 / r) |G|^2 for rank r, as the
    essay's formula has it with a = b = 1/4; so the best rate is r / (r + 1) of the dense one."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(400_000, 4, rank, generator=generator) for _ in range(2))
    z = (u @ v.mT / rank**0.5).flatten(1)
    bend = float((z[:, 0].square() * z.square().sum(1)).mean())
    assert bend == pytest.approx(18 / rate_share(rank), rel=0.06)
    estimator = ESTIMATORS["mezo"](1, 1e-3, None)
    dense, low = chosen_rate(estimator, 4.0, 4.0, 100.0)[0], chosen_rate(estimator, 4.0, 4.0, 100.0, rank)
    assert low[0] == pytest.approx(dense * rank / (rank + 1)) and f"rank {rank}" in low[1]


def test_every_step_of_a_search_has_a_v_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The curvature differs from V to V: one V for the whole search would measure its luck. After each step the V of
    the period is back, which what is kept of the period belongs to."""
    monkeypatch.setattr(rate_search, "STEPS", 3)
    opt, seen = keyhole.ZO(load(), "auto", rank=2, refresh=2, fold=False), []
    run = opt.directions.run
    monkeypatch.setattr(opt.directions, "run", lambda looks: (seen.append(opt.factors.v.clone()), run(looks))[1])
    for step in range(3):
        opt.step(batch(rows=4))
        assert torch.equal(opt.factors.v, opt.factors.draw_v((step + 1) // 2))
    assert all(torch.equal(v, opt.factors.draw_v(step)) for step, v in enumerate(seen)) and len(seen) == 3


@pytest.mark.parametrize("candidates", [False, True])
def test_losses_of_rows_add_up(candidates: bool) -> None:
    """To the loss of the batch."""
    whole = dict(batch(rows=4))
    if candidates:
        whole |= {"question": torch.tensor([0, 0, 1, 1]), "answer": torch.tensor([1, 0, 0, 1])}
    sent = to_device(whole, torch.device("cpu"))
    nll_N = torch.rand(sent.token_count, generator=torch.Generator().manual_seed(0))
    rows = sent.loss.by_group(nll_N)
    assert rows.shape == (2 if candidates else 4,)
    torch.testing.assert_close(rows.sum(), sent.loss.total(nll_N))


@in_every_run(lambda estimator: estimator == "fzoo")
@pytest.mark.parametrize("estimator", DEFAULTS)
def test_nothing_moves_until_a_rate_is_found_by_which_it_learns(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every estimator: weights are still for the whole search, and then the loss of the batch falls."""
    model, half = load(), batch(rows=4)
    one = {name: torch.cat([x, x]) for name, x in half.items()}  # halves that agree: what is learnt is this batch
    before = weights(model)
    opt = keyhole.ZO(model, "auto", estimator=estimator, eps=EPS, weight_decay=0.1)
    monkeypatch.setattr(rate_search, "STEPS", 8)
    for _ in range(8):
        assert opt.rate == 0.0
        opt.step(one)
    opt.flush()
    assert equal(before, weights(model)) and opt.rate > 0 and len(opt.news()) == 1 and not opt.news()
    losses = [float(opt.step(one)) for _ in range(10)]
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize("stopped", [1, 2, 3, 4])
def test_steps_of_one_row_are_not_counted(stopped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the last of an epoch: other steps take their place, in a resumed run too."""
    monkeypatch.setattr(rate_search, "STEPS", 3)
    rows = [batch(rows=4, seed=i) if i % 2 == 0 else batch(rows=1, seed=i) for i in range(5)]
    whole = keyhole.ZO(load(), "auto", eps=EPS)
    found = []
    for one in rows:
        whole.step(one)
        found.append(whole.search.found)
    assert found[:4] == [None] * 4 and found[4] > 0
    first, second = keyhole.ZO(load(), "auto", eps=EPS), keyhole.ZO(load(), "auto", eps=EPS)
    for one in rows[:stopped]:
        first.step(one)
    second.load_state_dict(first.state_dict())
    for one in rows[stopped:]:
        second.step(one)
    assert second.search.found == found[4]


def test_a_first_step_of_one_row_is_refused() -> None:
    with pytest.raises(UserError, match="two halves of a step's rows, and this step has one"):
        keyhole.ZO(load(), "auto", eps=EPS).step(batch(rows=1))
