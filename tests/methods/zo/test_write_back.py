"""Units that stay away from home for several steps: the same bits, fewer bytes, whatever happens in between."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keyhole
from keyhole.checkpoint.state import State
from keyhole.checkpoint.writer import Writer
from keyhole.errors import UserError
from keyhole.methods.zo.write_back import CALM, EVERY, WriteBack
from tests.methods.zo.loops import EPS, SEED, equal, weights
from tests.model.decoders import batch, load
from tests.model.streaming import streamed


def run(model: keyhole.Model, events: list[str], every: int | None = 1, **options: object) -> list[float]:
    """Steps, and what may come between them. Returns losses, and after each step how many weights the update moved."""
    opt = keyhole.ZO(model, 1e-2, eps=EPS, seed=SEED, weight_decay=0.1, write_back_every=every, **options)
    found: list[float] = []
    for t, event in enumerate(events):
        if event == "step":
            found += [opt.step(batch(seed=t)).item(), int(opt.update.changed)]
        elif event == "look":
            found += model.nll(batch(seed=t))[0].tolist()
        elif event == "break":
            broken_step(model, opt, t)
        else:
            opt.update.write_back.every = int(event)
    opt.flush()
    return [*found, int(opt.update.changed)]


def broken_step(model: keyhole.Model, opt: keyhole.ZO, t: int) -> None:
    """Interrupted at some unit; a different one each time."""
    units, real = model.layout.of_kind("block"), model.engine.acquire

    def acquire(page: int, changes: bool = True) -> torch.Tensor:
        if page == units[t % len(units)].index:
            raise KeyboardInterrupt
        return real(page, changes)

    model.engine.acquire = acquire
    with pytest.raises(KeyboardInterrupt):
        opt.step(batch(seed=t))
    model.engine.acquire = real


@settings(max_examples=4, deadline=None)
@given(
    events=st.lists(st.sampled_from(["step", "step", "step", "look", "break", "1", "2", "3"]), max_size=9),
    name=st.sampled_from(["llama", "opt", "mixtral"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    directions=st.sampled_from([1, 2]),
)
def test_when_units_go_home_never_shows(events: list[str], name: str, dtype: str, directions: int) -> None:
    """Losses, counts and weights are those of a resident run, through looks, interrupts and changes of mind."""
    events = ["3", "step", *events, "step"]
    resident = load(name, dtype=dtype)
    patient = streamed(resident, max_unit_numel=1, slot_count=2, chaos=random.Random(0))
    assert run(resident, events, directions=directions) == run(patient, events, directions=directions)
    assert equal(weights(resident), weights(patient))


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_packed_units_stay_away_too(rounding: str) -> None:
    """Weights in 8 bits are packed anew by every update: all of them in the same order, whenever they are made."""
    how = {"dtype": "bfloat16", "wire": "fp8", "placement": "stream"}
    models = [load("opt", **how) for _ in range(2)]
    found = [run(m, ["step"] * 5, every, rounding=rounding) for m, every in zip(models, (1, 4), strict=True)]
    assert found[0] == found[1] and equal(*map(weights, models))


def test_an_nth_of_the_blocks_comes_home_a_step() -> None:
    """In n steps every block crosses down once, in turns; up, and all that is no block, crosses every step."""
    model = streamed(load("opt"), max_unit_numel=1)
    opt, engine = keyhole.ZO(model, eps=EPS, write_back_every=3), model.engine
    opt.step(batch())
    sizes = {unit.index: unit.numel * 4 for unit in model.layout.units if unit.index in engine.streamed}
    blocks = [sizes[unit.index] for unit in model.layout.of_kind("block")]
    downs, ups = [], []
    for _ in range(6):
        up, down = engine.bytes_up, engine.bytes_down
        opt.step(batch())
        ups, downs = [*ups, engine.bytes_up - up], [*downs, engine.bytes_down - down]
    others = sum(sizes.values()) - sum(blocks)
    assert set(ups) == {sum(sizes.values())}
    assert downs[:3] == downs[3:] and sum(downs[:3]) == sum(blocks) + 3 * others
    assert all(down < sum(sizes.values()) for down in downs)
    assert len(opt.update.waiting) <= 3


def two_runs(tiny_model: Path, every: int) -> tuple[keyhole.ZO, list[torch.Tensor]]:
    """A run of three steps whose units stay away, and the weights that it has then, from one that goes home."""
    models = [keyhole.load(tiny_model, device="cpu", placement="stream") for _ in range(2)]
    opts = [keyhole.ZO(m, 1e-2, eps=EPS, write_back_every=n) for m, n in zip(models, (every, 1), strict=True)]
    for t in range(3):
        for opt in opts:
            opt.step(batch(seed=t))
    opts[1].flush()
    return opts[0], weights(models[1])


def saved(opt: keyhole.ZO, path: Path, steps: int = 1) -> list[torch.Tensor]:
    """The weights in a checkpoint that is begun now, and written while so many steps are made."""
    background = Writer(opt.model, opt)
    background.begin(path, State(3))
    for t in range(3, 3 + steps):
        opt.step(batch(seed=t))
    assert background.wait().error is None
    return weights(keyhole.load(path, device="cpu"))


def test_a_checkpoint_gets_the_weights_of_its_step(tiny_model: Path, tmp_path: Path) -> None:
    """Begun while units still lack several updates: the next step brings all home, as they are after this one."""
    opt, expected = two_runs(tiny_model, 4)
    assert max(len(opt.update.deferred(unit)) for unit in opt.model.layout.units) == 3
    assert equal(expected, saved(opt, tmp_path / "c"))


def test_a_checkpoint_begun_after_a_broken_step(tiny_model: Path, tmp_path: Path) -> None:
    """Some units have their update already, others wait for it: all are saved as they are after the last step."""
    opt, expected = two_runs(tiny_model, 2)
    broken_step(opt.model, opt, 1)
    assert equal(expected, saved(opt, tmp_path / "c", steps=2))


def freeze(model: keyhole.Model) -> keyhole.Model:
    """The first block."""
    for tensor in model.layout.tensors:
        tensor.param.requires_grad_(tensor.block != 0)
    return model


def test_what_is_frozen_never_goes_home(tiny_model: Path, tmp_path: Path) -> None:
    """Down crosses only what is trained, the weights are those of a resident run, and a checkpoint has all of them."""
    resident = freeze(keyhole.load(tiny_model, device="cpu"))
    model = freeze(keyhole.load(tiny_model, device="cpu", placement="stream"))
    same, opt = (keyhole.ZO(m, 1e-2, eps=EPS, write_back_every=1) for m in (resident, model))
    for t in range(2):
        assert same.step(batch(seed=t)).item() == opt.step(batch(seed=t)).item()
    down = model.engine.bytes_down
    assert same.step(batch(seed=2)).item() == opt.step(batch(seed=2)).item()
    trained = [u for u in model.layout.units if u.index in model.engine.streamed and u.block != 0]
    assert model.engine.bytes_down - down == sum(unit.numel for unit in trained) * 4
    same.flush()
    assert equal(weights(resident), saved(opt, tmp_path / "c"))


def test_the_wait_decides() -> None:
    """One long wait lets units stay away; only many steps on end without one bring them home."""
    policy, calm = WriteBack(streamed(load())), [0.0] * CALM

    def after(*waits: float) -> int:
        for waited in waits:
            policy.learn(waited)
        return policy.every

    assert after(*calm, 0.1, 0.2) == 1
    assert after(0.3) == EVERY == after(*calm[1:], 0.1, *calm[1:])
    assert after(0.0) == 1


def test_what_is_said_and_refused() -> None:
    """The start block has a line only where units may stay away; nonsense is refused."""
    resident = load()
    assert keyhole.ZO(resident, write_back_every=2).describe()[1:] == []
    model = streamed(resident)
    assert keyhole.ZO(model, write_back_every=2, deferred_update=False).describe()[1:] == []
    assert keyhole.ZO(model).describe()[1:] == []
    assert "every 2 steps" in keyhole.ZO(model, write_back_every=2).describe()[1]
    with pytest.raises(UserError, match="zo.write_back_every: found 0, expected whole number >= 1"):
        keyhole.ZO(model, write_back_every=0)


@pytest.mark.gpu
@pytest.mark.parametrize("wire", [None, "fp8"])
def test_on_the_gpu_under_random_delays(wire: str | None) -> None:
    """20 random schedules with delayed streams and poisoned slots: the bits of a run that goes home every step."""
    how = {"device": "cuda", "dtype": "bfloat16", "placement": "stream", "wire": wire}
    plain = load("llama", **how)
    expected, after = run(plain, ["step"] * 12), weights(plain)
    for schedule in range(20):
        model = load("llama", **how, chaos=random.Random(schedule))
        assert run(model, ["step"] * 12, 2 + schedule % 3) == expected, schedule
        assert equal(after, weights(model)), schedule
        model.close()


@pytest.mark.gpu
def test_on_the_gpu_the_waits_decide() -> None:
    """Where uploads take longer and longer (10 to 320 ms more), units stay away; the numbers stay the same. The first
    delays may be short beside what others do on the same GPU; the last ones are not."""
    how = {"device": "cuda", "dtype": "bfloat16", "placement": "stream"}
    models = [load("llama", **how, chaos=random.Random(0)) for _ in range(2)]  # or few pages would leave their slots
    uploads = itertools.count()
    models[1].engine._delay = lambda: torch.cuda._sleep(20_000_000 << min(next(uploads) // 4, 5))
    assert run(models[0], ["step"] * 8) == run(models[1], ["step"] * 8, None)
    assert equal(*map(weights, models))
    assert models[1].engine.bytes_down < models[0].engine.bytes_down
