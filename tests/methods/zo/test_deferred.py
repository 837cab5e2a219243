"""The update that waits for the next step: resumed, replayed, asked for early or interrupted, it is made once."""

import gc
from typing import Any

import pytest
import torch

import keyhole
from tests.matrix import in_every_run
from tests.methods.zo.loops import EPS, SEED, equal, weights
from tests.model.decoders import batch, load
from tests.model.streaming import streamed


def test_saving_and_looking_apply_the_last_update(tmp_path: Any) -> None:
    """Who forgets flush() finds the weights after the last step all the same."""
    models = [load(placement="stream") for _ in range(3)]
    opts = [keyhole.ZO(model, 1e-2, eps=EPS) for model in models]
    for opt in opts:
        opt.step(batch())
    opts[0].flush()
    models[1].save_pretrained(tmp_path / "out")
    models[2].nll(batch())
    assert all(opt.update.pending is None and equal(weights(models[0]), weights(opt.model)) for opt in opts)


@pytest.mark.parametrize("wire", [None, "fp8"])
def test_replayed_updates_are_the_updates(tiny_model: Any, wire: str | None) -> None:
    """All updates of a unit before the next unit: the weights of the run, bit for bit, as many of them changed."""
    how = {"device": "cpu", "dtype": "bfloat16", "placement": "stream", "wire": wire}
    model, again = keyhole.load(tiny_model, **how), keyhole.load(tiny_model, **how)
    zo, other = (keyhole.ZO(m, lr=1e-3, directions=2, weight_decay=0.1) for m in (model, again))
    updates = []
    for step in range(3):
        ids = torch.randint(0, 200, (2, 8), generator=torch.Generator().manual_seed(step))
        zo.step({"input_ids": ids, "labels": ids})
        updates.append(zo.latest)
    zo.flush()
    other.replay(updates)
    theirs = dict(again.named_tensors())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.named_tensors())
    assert int(zo.update.changed) == int(other.update.changed) and other.update.pending is None


@in_every_run(lambda name, retries: retries or name == "llama")
@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("kind", ["block", "head"])
@pytest.mark.parametrize("retries", [True, False])
def test_a_step_that_breaks_off_updates_no_weight_twice(name: str, kind: str, retries: bool) -> None:
    """An interrupt at a unit in the middle: the step again, or a flush, ends as if there had been none."""

    def run(model: keyhole.Model, breaks: bool) -> list[torch.Tensor]:
        opt, real = keyhole.ZO(model, 1e-2, eps=EPS, seed=SEED), model.engine.acquire
        last = (model.layout.of_kind("block")[1:2] if kind == "block" else model.layout.head_units)[-1]

        def acquire(page: int, changes: bool = True) -> torch.Tensor:
            if page == last.index:
                raise KeyboardInterrupt
            return real(page, changes)

        opt.step(batch(seed=0))
        if breaks:
            model.engine.acquire = acquire
            with pytest.raises(KeyboardInterrupt):
                opt.step(batch(seed=1))
            model.engine.acquire = real
        if retries:
            opt.step(batch(seed=1))
        opt.flush()
        return weights(model)

    expected = run(load(name), breaks=False)
    assert equal(expected, run(load(name), breaks=True))
    assert equal(expected, run(streamed(load(name), slot_count=2), breaks=True))


def test_updates_outlive_their_method() -> None:
    """Who makes another method, or lets go of this one, without a flush loses nothing: not its last updates, either."""

    def left_by(model: keyhole.Model, **options: Any) -> keyhole.Model:
        opt = keyhole.ZO(model, 1e-2, eps=EPS, seed=SEED, **options)
        for t in range(3):
            opt.step(batch(seed=t))
        if not options:
            opt.flush()
        return model

    expected = weights(left_by(load()))
    for another in (keyhole.ZO, keyhole.LOMO):
        model = left_by(streamed(load()), write_back_every=4)
        assert not equal(expected, [model.home(tensor) for tensor in model.layout.tensors])
        another(model)
        assert equal(expected, [model.home(tensor) for tensor in model.layout.tensors])
    model = left_by(streamed(load()), write_back_every=4)
    gc.collect()
    assert equal(expected, weights(model))
