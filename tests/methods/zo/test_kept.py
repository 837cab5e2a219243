"""Earlier periods beside frozen weights, folded into sums in fewer terms: within the bound, exactly repeatable."""

import random
import warnings
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.zo.low_rank import kept as kept_module
from keyhole.methods.zo.memory import factor_bytes, kept_terms
from keyhole.methods.zo.traits import ZOConfig
from keyhole.methods.zo.update import Pending
from tests.matrix import in_every_run
from tests.methods.zo.loops import EPS, SEED, equal, load, train, weights
from tests.model.decoders import batch, config
from tests.model.streaming import streamed

KEEP = {"rank": 2, "refresh": 1, "fold": False}
ERROR = 0.2
FOLDED = KEEP | {"fold_periods": 3, "fold_error": ERROR}


def narrow(name: str, **options: Any) -> keyhole.Model:
    """A model whose matrices have no room for the terms of ten periods: folds take a tenth of the time."""
    size = {"opt": {"ffn_dim": 32, "word_embed_proj_dim": 16}, "llama": {"intermediate_size": 32}}[name]
    return keyhole.load(config(name, hidden_size=16, **size), init="random", device="cpu", **options)


def known_updates(count: int) -> list[tuple[Pending, float]]:
    """Of steps that nobody has made: rates and slopes as they come."""
    generator = torch.Generator().manual_seed(0)
    coefs = torch.cat([torch.full((count, 1), 1e-2), torch.randn(count, 1, generator=generator)], dim=1)
    return [(Pending(coef, step), 0.0) for step, coef in enumerate(coefs)]


def sums(method: keyhole.ZO) -> list[torch.Tensor]:
    """All that was learned of every matrix, made whole."""
    factors = method.factors
    found = []
    for index in range(len(factors.parts.matrices)):
        a, v = (torch.cat(rows).double() for rows in zip(*factors.learned(index), strict=True))
        found.append(a.t() @ v)
    return found


@pytest.mark.parametrize("error", [0.0, ERROR])
def test_no_matrix_is_further_off_than_the_bound(error: float) -> None:
    """After two folds and a period more: the distance from the sum of all periods is below what was logged, that
    below the bound, and the rank is lower where the bound allows it; never above the sides of the matrix."""
    exact, folded = (
        keyhole.ZO(narrow("llama"), 1e-2, seed=SEED, **KEEP, fold_periods=every, fold_error=error)
        for every in (None, 9)
    )
    for method in (exact, folded):
        list(method.replay(known_updates(19)))
    kept = folded.factors.kept
    side = max(min(m.inputs, m.outputs) for m in kept.parts.matrices)
    assert kept.last.steps == 18 and len(kept.last.ranks) == len(kept.parts.matrices)
    assert exact.factors.kept.rank == 38 > side + 2 >= kept.rank
    assert kept.last.error <= max(error, 1e-5) and kept.metrics()["fold_error"] == kept.last.error
    assert error < 0.1 or max(kept.last.ranks) < side
    for ours, theirs in zip(sums(folded), sums(exact), strict=True):
        off = float((ours - theirs).norm() / theirs.norm())
        assert off <= 1.1 * kept.last.error + 1e-5  # one period more than when it was logged
    assert len(folded.news()) == 2 and not folded.news()


def test_a_bound_that_cannot_be_met_keeps_the_terms() -> None:
    """Random periods have nothing in common: with a tight bound all terms stay, and nothing is lost."""
    method = keyhole.ZO(load(), 1e-2, seed=SEED, **KEEP, fold_periods=4, fold_error=1e-4)
    list(method.replay(known_updates(4)))
    kept = method.factors.kept
    assert set(kept.last.ranks) == {8} and kept.last.error < 1e-5


def test_another_machine_s_sums_are_noticed() -> None:
    """A record of the journal has a checksum of the sums; a replay whose sums differ says so."""
    method, again = (keyhole.ZO(narrow("llama"), 1e-2, seed=SEED, **FOLDED) for _ in range(2))
    for one in (method, again):
        list(one.replay(known_updates(3)))
    (checksum,) = method.directions.checksums
    assert checksum > 0 and method.remembers == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.remember([checksum])
    with pytest.warns(UserWarning, match="up to rounding, not to the bit"):
        again.remember([checksum + 1])


def test_folds_that_would_take_hours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the terms that come together, where the matrices are as wide; the setting that helps is named. Factors that
    are folded into the weights have no such limit."""
    monkeypatch.setattr(kept_module, "MOST_TERMS", 12)
    with pytest.raises(UserError, match="zo.fold_periods: 8 periods of rank 2 are 16 terms.*zo.fold_periods=6"):
        keyhole.ZO(narrow("llama"), 1e-2, **KEEP, fold_periods=8)
    keyhole.ZO(narrow("llama"), 1e-2, **KEEP, fold_periods=6)
    keyhole.ZO(narrow("llama"), 1e-2, rank=2)


@in_every_run(lambda name, dtype: name == "llama" and dtype == "bfloat16")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streamed_equals_resident(name: str, dtype: str) -> None:
    """Across two folds, to the bit."""
    resident = load(name, dtype=dtype)
    away = streamed(resident, chaos=random.Random(0))
    expected = train(resident, 8, lr=1e-2, **FOLDED)
    assert train(away, 8, lr=1e-2, **FOLDED) == expected and equal(weights(resident), weights(away))
    assert resident.low_rank.factors.kept.last.steps == 6


@in_every_run(lambda stop: stop != 5)
@pytest.mark.parametrize("stop", [2, 3, 5])
def test_goes_on_before_and_after_a_fold(stop: int) -> None:
    """Stopped at a step between folds, or right after one: the weights, sums and logged errors of a run through."""
    once = load("opt", dtype="bfloat16")
    train(once, 8, lr=1e-2, **FOLDED)
    first = keyhole.ZO(load("opt", dtype="bfloat16"), 1e-2, eps=EPS, seed=SEED, **FOLDED)
    second = keyhole.ZO(load("opt", dtype="bfloat16"), 1e-2, eps=EPS, seed=SEED, **FOLDED)
    for t in range(8):
        if t == stop:
            state = first.state_dict()
            second.load_state_dict({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()})
        method = first if t < stop else second
        method.lr = 1e-2 * (1 - t / 40)
        method.step([batch(seed=t)])
    assert equal(weights(once), weights(second.model))
    kept, expected = second.factors.kept, once.low_rank.factors.kept
    assert kept.last == expected.last and kept.lost == expected.lost
    for ours, theirs in zip(kept.here + kept.sums, expected.here + expected.sums, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_passes_use_what_is_saved() -> None:
    """The loss over the kept terms is that of the merged weights."""
    model = load()
    train(model, 7, lr=1e-2, **FOLDED)
    merged = load()
    for tensor, (_, saved) in zip(merged.layout.tensors, model.named_tensors(), strict=True):
        merged.home(tensor).copy_(saved)
    torch.testing.assert_close(model.nll(batch(seed=9))[0], merged.nll(batch(seed=9))[0], rtol=1e-5, atol=1e-5)


def test_the_plan_counts_kept_terms_to_the_end_of_the_run() -> None:
    """As many as there may be: all of them, until a matrix has no room for more."""
    model = narrow("opt", dtype="bfloat16")

    def settings(every: int | None) -> dict[str, Any]:
        return KEEP | {"fold_periods": every, "fold_error": 0.0}

    sides = {m.tensor.name: (m.inputs, m.outputs) for m in keyhole.ZO(narrow("opt"), **KEEP).factors.parts.matrices}
    for every, steps in ((None, 20), (10, 15), (10, 20)):
        own = ZOConfig(**settings(every))
        method = keyhole.ZO(model, 1e-2, **settings(every))
        list(method.replay(known_updates(steps)))
        held = sum(a.nbytes + v.nbytes for a, v in method.factors.kept.rooms)
        most = 2 * kept_terms(model.layout, own, steps)
        assert held <= most and (held == most or every is not None)
        assert factor_bytes(model.layout, own, 1, 2, steps) - factor_bytes(model.layout, own, 1, 2, 0) == most
        model.methods.low_rank = None
    assert most == 2 * sum(kept_module.room_for(20 + min(20, *side)) * sum(side) for side in sides.values())
