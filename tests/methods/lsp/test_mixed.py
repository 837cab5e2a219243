"""LSP with the moments of some units on the device and of others on the host: the same training, wherever they are."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keyhole
from keyhole.errors import UserError
from keyhole.methods.lsp import method as lsp
from keyhole.methods.lsp.adam import SLOTS, HostAdam
from keyhole.methods.lsp.memory import count_numbers
from keyhole.methods.lsp.method import LSP
from keyhole.methods.lsp.traits import LSPConfig
from keyhole.methods.workload import Workload
from tests.matrix import in_every_run
from tests.methods.lomo.loops import micro_batches, weights
from tests.methods.lsp.loops import EPS, SMALL, SOON, load, near, train
from tests.model.decoders import batch, config
from tests.model.streaming import assert_trained_alike, streamed


@pytest.fixture
def placed_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], None]:
    """Decides for every unit whether its moments are on the device."""

    def decide(on_device: Callable[[int], bool]) -> None:
        monkeypatch.setattr(lsp, "place_moments", lambda model, targets, *_: {u for u in targets if on_device(u)})

    return decide


def state_of(opt: LSP) -> dict[str, Any]:
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in opt.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key] for key, value in one.items()
    )


def trained(**options: Any) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """Losses, weights and state after three steps, with projectors that change on the way."""
    model = load()
    opt = LSP(model, **SOON, **options)
    losses = train(opt, 3, 2)
    found = losses, weights(model), state_of(opt)
    opt.close()
    return found


@functools.cache
def all_on_the_device() -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    return trained(optimizer_on="gpu")


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.integers(0, 6)))
def test_where_moments_are_changes_nothing(placed_by: Any, here: set[int]) -> None:
    """Any split: weights, moments and counts of the run that has them all on the device, to the bit on a CPU."""
    expected = all_on_the_device()
    placed_by(here.__contains__)
    losses, found, state = trained()
    assert losses == expected[0] and same(found, expected[1]) and same(state, expected[2])


WHOLE, CUT = {"slot_count": 2}, {"slot_count": 9, "max_unit_numel": 4000}


@in_every_run(lambda name, clip: (name == "llama") == (clip is None))
@pytest.mark.parametrize(
    "name, how, clip", [("llama", WHOLE, None), ("llama", CUT, 0.7), ("gpt2", WHOLE, 0.7), ("gpt2", CUT, None)]
)
def test_streamed_equals_resident(placed_by: Any, name: str, how: dict[str, int], clip: float | None) -> None:
    """Losses and weights, to the bit, with whole blocks and with blocks cut into several units."""

    def make(model: keyhole.Model) -> LSP:
        blocks = {unit.index: unit.block for unit in model.layout.units}
        placed_by(lambda unit: blocks[unit] in (None, 0))
        opt = LSP(model, 1e-2, max_grad_norm=clip, **SOON)
        assert opt.updates.host.lengths and opt.updates.device.lengths
        return opt

    resident = load(name)
    assert_trained_alike([resident, streamed(resident, **how)], make, [micro_batches(t, 2) for t in range(3)])


def test_resident_units_are_updated_while_the_backward_pass_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the host is fast enough, only the last block and what comes after it are left for the next forward pass,
    though a block has more units than there are slots for their steps."""
    model = streamed(load(), max_unit_numel=4000, keep=("block", "table", "head"))
    fetch = HostAdam.fetch
    monkeypatch.setattr(HostAdam, "fetch", lambda host, unit: host.pool.drain() or fetch(host, unit))
    method = LSP(model, optimizer_on="cpu", learn=False, **SMALL)
    method.step([batch()])
    units = [unit for unit in model.layout.of_kind("block") if unit.block == model.layout.block_count - 1]
    assert len(units) > SLOTS and not {unit.index for unit in units} & set(method.updates.deferred)


@in_every_run(lambda clip: clip is None)
@pytest.mark.parametrize("clip", [None, 0.7])
def test_stopped_and_resumed_with_moments_elsewhere(placed_by: Any, clip: float | None) -> None:
    """N + M steps are N + M steps, though the second part has its moments in other places."""
    placed_by(lambda unit: unit < 3)
    straight, stopped = load(dtype="bfloat16"), load(dtype="bfloat16")
    train(LSP(straight, max_grad_norm=clip, **SOON), 4)
    first = LSP(stopped, max_grad_norm=clip, **SOON)
    train(first, 3)
    state = state_of(first)
    first.close()
    placed_by((lambda unit: unit > 2) if clip is None else (lambda unit: unit < 3))
    second = LSP(stopped, max_grad_norm=clip, **SOON)
    second.load_state_dict(state)
    train(second, 1, first=3)
    assert same(weights(straight), weights(stopped))


def test_auto_fills_the_budget() -> None:
    """A budget for part of the moments: the planned peak is within it, the embedding first, the head not."""
    found, work = [], Workload("lsp", 20, 1, LSPConfig(d=16))
    least = load(workload=Workload("lsp", 20, 1, LSPConfig(d=16, optimizer_on="cpu")))
    need = least.placed.device_bytes.total  # with no moment on the device
    numbers = count_numbers(least.layout, work.settings).of
    for units in (0, 3, len(numbers)):
        more = 8 * sum(list(numbers.values())[:units])
        model = load(workload=work, gpu_memory=f"{need + more}B")
        opt = LSP(model, **SMALL)
        train(opt, 2)
        assert model.placed.device_bytes.total <= need + more
        found.append({model.layout.units[unit].kind for unit in opt.updates.device.lengths})
        opt.close()
    assert found == [set(), {"common", "table", "block"}, {"common", "table", "block", "head"}]


def test_a_gradient_that_is_not_finite_on_one_side_only(placed_by: Any) -> None:
    """All units on the host skip the step and all on the device take it: that is no step, and the run stops."""
    placed_by(lambda unit: unit != 2)
    opt = LSP(load(), **SMALL)
    add = opt.updates.gradient
    bad = lambda tensor, w, grad: add(tensor, w, grad * (float("inf") if tensor.block == 0 else 1.0))  # noqa: E731
    opt.updates.gradient = bad
    opt.step(batch())
    with pytest.raises(UserError, match="last checkpoint"):
        opt.flush()


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [None, 0.7])
def test_two_places_take_the_same_steps_on_a_gpu(placed_by: Any, clip: float | None) -> None:
    """In float32 weights of all on the GPU, all on the CPU and a mixture agree up to the rounding of two kernels."""
    found = []
    for on_device in (lambda unit: True, lambda unit: False, lambda unit: unit < 3):
        placed_by(on_device)
        model = keyhole.load(config("llama"), init="random", device="cuda", dtype="float32")
        opt = LSP(model, max_grad_norm=clip, eps=EPS, **SMALL)
        train(opt, 5, 2)
        found.append(weights(model))
        assert opt.updates.host is None or opt.updates.host.update_s > 0
        opt.close()
        model.close()
    for other in found[1:]:
        assert all(near(other[key], found[0][key]) for key in other)
