"""A capture that fails leaves nothing behind."""

from typing import Any

import pytest
import torch

from keyhole.machine import gpu


class Graph:
    """Stands for a CUDA graph on a machine without CUDA."""

    def __init__(self, ends: bool) -> None:
        self.ends, self.calls = ends, []

    def capture_begin(self, **how: Any) -> None:
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")
        if not self.ends:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize(("raises", "ends"), [(False, True), (True, True), (True, False)])
def test_the_allocator_hears_of_every_failed_capture(monkeypatch: pytest.MonkeyPatch, raises: bool, ends: bool) -> None:
    told: list[Any] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())

    def end(*of: Any) -> None:
        if ends:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        told.append(("end", *of))

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *of: told.append(("release", *of)), raising=False)
    graph, stream = Graph(ends), type("Stream", (), {"device_index": 0})()
    try:
        with gpu.capturing(graph, (0, 7), stream):
            if raises:
                raise ValueError("a host read")
    except (ValueError, RuntimeError) as error:
        assert raises, error
    assert graph.calls == ["begin", "end"]
    assert told == ([] if ends else [("end", 0, (0, 7)), ("release", 0, (0, 7))])


def test_a_capture_that_does_not_begin_releases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator does not know its pool: the first call says so, and there is no second."""
    told: list[str] = []

    def end(*of: Any) -> None:
        told.append("end")
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def refuse(**how: Any) -> None:
        raise RuntimeError("CUDA graphs must be captured on a non-default stream")

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *of: told.append("release"), raising=False)
    graph: Any = Graph(ends=True)
    graph.capture_begin = refuse
    with (
        pytest.raises(RuntimeError, match="non-default"),
        gpu.capturing(graph, (0, 7), type("Stream", (), {"device_index": 0})()),
    ):
        pass
    assert graph.calls == [] and told == ["end"]


@pytest.mark.gpu
def test_memory_is_given_back_after_a_failed_capture() -> None:
    """A host read makes a capture invalid; what is cached afterwards can be freed all the same, and so can what the
    capture has allocated."""
    ones, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    at_first = torch.cuda.memory_reserved()
    with (
        pytest.raises(RuntimeError),
        gpu.capturing(graph, torch.cuda.graph_pool_handle(), torch.cuda.Stream()),
    ):
        large = torch.zeros(2**26, dtype=torch.uint8, device="cuda")
        del large
        (2 * ones).sum().item()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    held = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del held
    assert torch.cuda.memory_reserved() >= before + 2**28
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= min(before, at_first + 2**22)
