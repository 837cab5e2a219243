"""When projectors are learned and on what: ours, and the paper's Algorithm 1 to the letter."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.methods.lsp.fit import bias
from keyhole.methods.lsp.learn import slices_of
from keyhole.methods.lsp.method import LSP
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import micro_batches, weights
from tests.methods.lsp.loops import SOON, load

PAPER = {"preset": "paper", "d": 16, "r": 4, "alpha": 0.3, "check_freq": 2, "fit_steps": 5, "optimizer_on": "gpu"}


def matrices(opt: LSP) -> list[Any]:
    return [target for target in opt.targets.values() if target.p is not None]


def gradients(seed: int, like: LSP) -> dict[str, torch.Tensor]:
    """Of a batch, by torch, at the weights of a run."""
    module = load().module
    for name, p in module.named_parameters():
        p.data.copy_(weights(like.model)[name])
    plain_loss(module, micro_batches(seed, 1)).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def test_paper_the_first_update_goes_through_random_projectors_without_a_scale() -> None:
    """W - lr P Adam(P^T G Q) Q^T with P and Q from N(0, 1/sqrt r), written out; nothing is checked before it."""
    opt = LSP(load(), lr=1e-2, **PAPER)
    before, grads = weights(opt.model), gradients(0, opt)
    opt.step(micro_batches(0, 1))
    assert opt.check is None and {target.p.kind for target in matrices(opt)} == {"free"}
    for target in matrices(opt):
        p, q = target.p.dense_Rd(), target.q.dense_Rd()
        s = p.T @ grads[target.name] @ q
        expected = before[target.name] - 1e-2 * p @ (s / (s.abs() + 1e-8)) @ q.T
        moved = weights(opt.model)[target.name]
        assert (moved - expected).norm() <= 1e-3 * (expected - before[target.name]).norm()
    free = torch.cat([target.p.values_Rr.flatten() for target in matrices(opt) if target.p.r == 4])
    assert float(free.std()) == pytest.approx(4**-0.5, rel=0.1)


def test_paper_a_check_looks_at_all_matrices_and_takes_what_was_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of the batch's own gradient; above alpha, new projectors and P_new^T P M Q^T Q_new, better or not."""
    opt = LSP(load(), lr=1e-2, **PAPER)
    opt.step(micro_batches(0, 1))
    old = {t.name: (t.p, t.q, *(m.clone() for m in opt.updates.moments_of(t))) for t in matrices(opt)}
    grads, seen = gradients(1, opt), {}
    begin = opt.updates.begin  # right behind the check
    keep = lambda: seen.update({t.name: [m.clone() for m in opt.updates.moments_of(t)] for t in matrices(opt)})  # noqa: E731
    opt.updates.begin = lambda *args: (keep(), begin(*args))
    opt.step(micro_batches(1, 1))
    assert opt.check.found.keys() == opt.check.biases.keys() == old.keys()
    for target in matrices(opt):
        p, q, m, v = old[target.name]
        found = opt.check.found[target.name]
        assert found == pytest.approx(float(bias(grads[target.name], p, q)), rel=1e-2) and found > 0.3
        assert target.generation == 1 and target.scale == 1.0
        x_p, x_q = target.p.dense_Rd().T @ p.dense_Rd(), target.q.dense_Rd().T @ q.dense_Rd()
        torch.testing.assert_close(seen[target.name][0], x_p @ m @ x_q.T, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(seen[target.name][1], x_p**2 @ v @ (x_q**2).T, rtol=1e-3, atol=1e-9)
    opt.step(micro_batches(2, 1))
    assert opt.check is None  # CheckFreq = 2


def test_the_log_tells_what_a_check_found_from_what_was_fitted() -> None:
    """bias_found is that of projectors which have not seen the batch, and above what they are fitted to."""
    opt = LSP(load(), **SOON | {"alpha": 1e-6, "check_share": 1.0})
    opt.step(micro_batches(0, 1))
    assert "bias_found" not in opt.metrics() and opt.metrics()["learn_s"] > 0
    opt.step(micro_batches(1, 1))
    assert not {"bias", "bias_found", "learn_s"} & opt.metrics().keys()
    opt.step(micro_batches(2, 1))
    assert 0 < opt.metrics()["bias"] < opt.metrics()["bias_found"]


@given(real=st.lists(st.booleans(), max_size=40), count=st.integers(1, 5))
def test_slices_count_no_padding(real: list[bool], count: int) -> None:
    """Slices of equally many tokens, as if padding were not there."""
    is_real = torch.tensor(real, dtype=torch.bool)
    rows = torch.arange(1.0, len(real) + 1)[:, None]
    places = is_real.nonzero().flatten().tolist()
    found = slices_of(rows * is_real[:, None], rows, count, places)
    alone = rows[is_real]
    each = max(1, len(alone) // count)
    expected = [part for part in alone.split(each) if len(part) == each][:count] if len(alone) else []
    assert [dy[dy.any(dim=1)].tolist() for dy, _ in found] == [part.tolist() for part in expected]
    assert all(torch.equal(x[:1], dy[:1]) and len(x) == len(dy) for dy, x in found)


@pytest.mark.parametrize("padding", ["right", "left"])
def test_padding_changes_no_subspace(padding: str) -> None:
    """Beyond rounding, which a fit repeats some times; it may turn the sign of a column, which cancels in P S Q^T."""
    spans, trained = [], []
    for more in (0, 21):
        opt, at = LSP(load(), lr=1e-2, **SOON), (more, 0) if padding == "left" else (0, more)
        for seed in (5, 6, 7):
            (batch,) = micro_batches(seed, 1)
            whole = {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}
            fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
            opt.step({key: torch.nn.functional.pad(whole[key], at, value=fill[key]) for key in fill})
        opt.flush()
        spans.append({(t.name, side): (d := getattr(t, side).dense_Rd()) @ d.T for t in matrices(opt) for side in "pq"})
        trained.append(weights(opt.model))
    for found, padded in (spans, trained):
        for name, values in found.items():
            assert (values - padded[name]).norm() <= 1e-3 * values.norm(), name


@pytest.mark.parametrize("generation", [1, 2, 5])
def test_positions_of_projectors_are_drawn_again(generation: int) -> None:
    """A checkpoint has the numbers of projectors; the positions are those of the generation they were drawn in."""
    target = matrices(LSP(load("llama"), 1e-3, d=16, r=4, kind="free"))[0]
    state = {f"{target.name}/generation": torch.tensor(generation)}
    drawn = target.draw(torch.device("cpu"), generation - 1)
    state |= {f"{target.name}/{side}": p.values_Rr * 2 for side, p in zip("pq", drawn, strict=True)}
    target.restore(state, torch.device("cpu"))
    for new, old in zip(target.pair, drawn, strict=True):
        assert torch.equal(new.dense_Rd(), 2 * old.dense_Rd())
    assert target.generation == generation
