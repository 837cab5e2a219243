"""Graphs of blocks: what could spoil them while they are recorded. (That they change no number: methods/test_zo_*.)"""

import gc
from typing import Any

import pytest
import torch

import keyhole
from keyhole.model.forward.graphs import _no_collection
from tests.methods.zo.loops import EPS, load
from tests.model.decoders import batch


class Loop:
    """Garbage that only a collection finds."""

    def __init__(self, held: Any) -> None:
        self.held, self.me = held, self


@pytest.mark.parametrize("enabled", [True, False])
def test_no_collection_within(enabled: bool) -> None:
    """It is put off, and afterwards things are as they were, also after an error."""
    was = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(ValueError), _no_collection():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if was else gc.disable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_of_a_model_that_is_gone_do_not_spoil_those_of_another() -> None:
    """Garbage with a graph in it, made while another graph is recorded, and objects enough for a collection."""
    old, x = [], torch.zeros(4, device="cuda")
    for _ in range(64):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
        old.append(graph)
    del graph
    model, littered = load("llama", device="cuda"), []

    def litter(module: torch.nn.Module, args: Any) -> None:
        if torch.cuda.is_current_stream_capturing() and old:
            littered.append(1)
            Loop(old.pop())
            [[] for _ in range(100_000)]

    for module in model.module.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(litter)
    opt = keyhole.ZO(model, 1e-3, eps=EPS)
    for _ in range(8):
        opt.step(batch())
    assert littered and model.graphs.recorded and all(model.graphs.recorded.values())
