"""LSP when something is wrong: gradients that are not finite, errors in the middle, settings, memory."""

import gc
import weakref
from typing import Any

import pytest
import torch

from keyhole.errors import UserError
from keyhole.machine.host import HostMemory
from keyhole.methods.lsp.method import LSP
from keyhole.offload.workers import WorkerFailed
from tests.methods.lomo.loops import weights
from tests.methods.lsp.loops import SMALL, load, train
from tests.model.decoders import batch


@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_a_step_that_is_not_finite(where: str) -> None:
    """All of it: nothing changes, by decay neither. Part: the run stops. Part, with max_grad_norm: nothing changes."""
    for clip, bad in ((None, "model.norm.weight"), (0.5, "model.layers.1.mlp.up_proj.weight")):
        model = load()
        opt = LSP(model, 1e-2, optimizer_on=where, max_grad_norm=clip, weight_decay=0.1, **SMALL)
        dict(model.named_tensors())[bad].fill_(float("nan"))
        before = weights(model)
        opt.step(batch())
        opt.flush()
        assert all(torch.equal(before[key].nan_to_num(), value.nan_to_num()) for key, value in weights(model).items())
    opt = LSP(load(), optimizer_on=where, **SMALL)
    with pytest.raises(UserError, match="last checkpoint"):
        _spoil_one_gradient(opt)


def _spoil_one_gradient(opt: LSP) -> None:
    inner = opt.updates.gradient
    opt.updates.gradient = lambda tensor, w, grad: inner(
        tensor, w, grad * float("inf") if "norm" in tensor.name else grad
    )
    opt.step(batch())
    opt.flush()


@pytest.mark.parametrize("where", ["gpu", "cpu"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_error_in_the_reverse_is_not_silent(clip: float | None, where: str) -> None:
    """Before a unit was given it costs nothing but the step; afterwards nobody may use the weights."""
    expected, model, how = load(), load(), SMALL | {"learn": False, "max_grad_norm": clip, "optimizer_on": where}
    train(LSP(expected, **how), 2)
    opt = LSP(model, **how)
    add, seen_units = opt.updates.finished, []

    def fail(unit: Any) -> bool:
        if len(seen_units) == fail.at:
            raise MemoryError("no room")
        seen_units.append(unit.index)
        return add(unit)

    fail.at, opt.updates.finished = 0, fail
    with pytest.raises(UserError, match="out of host memory: no room"):
        train(opt, 1)
    opt.updates.finished, opt.step_count = add, 0
    train(opt, 2)
    assert all(torch.equal(x, weights(model)[name]) for name, x in weights(expected).items())
    fail.at, opt.updates.finished = 2, fail
    with pytest.raises(UserError, match="out of host memory: no room"):
        train(opt, 1)
    opt.updates.finished = add
    with pytest.raises(UserError, match="an error came in between.*last checkpoint"):
        train(opt, 1)
    with pytest.raises(UserError, match="not usable"):
        opt.flush()


def test_a_failing_worker_ends_the_run() -> None:
    """With its cause, at the next step, and without hanging."""
    opt = LSP(load(), optimizer_on="cpu", **SMALL)
    opt.step(batch())
    opt.updates.host.rule = {"beta1": "no number"}
    with pytest.raises(WorkerFailed, match="failed"):
        for _ in range(2):
            opt.step(batch())


def test_what_cannot_be_done_is_refused() -> None:
    """A bare module, float16, a state of another seed, too little host memory."""
    opt = LSP(load(), **SMALL)
    for make, says in [
        (lambda: LSP(load().module), "keyhole.load"),
        (lambda: LSP(load(dtype="float16")), "bfloat16"),
        (lambda: opt.load_state_dict(opt.state_dict() | {"seed": 7}), "seed"),
    ]:
        with pytest.raises(UserError, match=says):
            make()


def test_host_memory_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is reserved."""
    monkeypatch.setattr("keyhole.methods.work.host_memory", lambda: HostMemory(2**20, 2**10, None))
    with pytest.raises(UserError, match="less: lsp.d"):
        LSP(load(), optimizer_on="cpu", **SMALL)


@pytest.mark.parametrize("options", [{}, {"optimizer_on": "cpu"}])
def test_a_dropped_method_leaves_nothing(options: dict[str, str]) -> None:
    """Neither hooks, the engine nor the worker keep it alive."""
    model = load()
    opt = LSP(model, **SMALL, **options)
    opt.step(batch())
    gone = weakref.ref(opt)
    del opt
    gc.collect()
    assert gone() is None and model.engine.arrival is None
