"""Fails on purpose, in the middle of a step, with a model, a budget and threads in its frames: tests/processes.py puts
it before all others. Nobody collects it by its name."""

import pytest

import keyhole
from tests.model.decoders import batch, load


@pytest.mark.gpu
def test_that_fails_while_it_holds_a_model() -> None:
    model = load(placement="stream", gpu_memory="2GiB", device="cuda", workload=keyhole.Workload("adam-offload"))
    opt = keyhole.AdamOffload(model, 1e-3)
    opt.step(batch())

    def inside(module, args):
        raise ZeroDivisionError("on purpose")

    model.module.model.norm.register_forward_pre_hook(inside)
    opt.step(batch())
