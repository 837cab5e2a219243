"""Streams of looks: without a GPU there are none, and with one each unit waits for the join of the unit before."""

import pytest
import torch

from keyhole.model.forward.captured import Branches


def test_without_streams_everything_stays_where_it_is() -> None:
    """No pass gets a stream, and forks and joins do nothing."""
    branches = Branches()
    branches.fork(0, 0)
    branches.fork(0, 1)
    branches.join()
    assert branches.of_passes([[range(2), range(2, 4)]]) == {} and not branches.forked


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_fork_reads_what_came_before_and_is_waited_for() -> None:
    """A chain in which every link needs both branches of the link before; slow kernels would show a missing edge."""
    device, branches = torch.device("cuda"), Branches(torch.device("cuda"), 1)
    x, halves = torch.randn(2048, 2048, device=device), torch.empty(2, 2048, 2048, device=device)

    def run() -> torch.Tensor:
        y = x.clone()
        for _ in range(12):
            for side, stream in enumerate(branches.streams):
                branches.fork(0, side)
                with torch.cuda.stream(stream):
                    torch.mm(y, y, out=halves[side]).mul_((side + 1) / 64)
            branches.join()
            y = torch.sin(x + halves[0] + halves[1])
        return y

    expected, graph = run(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        made = run()
    for _ in range(5):
        made.zero_()
        halves.fill_(torch.nan)
        graph.replay()
        assert torch.equal(made, expected) and torch.isfinite(made).all()
    assert branches.of_passes([[range(2), range(2, 4)]]) == dict(
        enumerate([branches.streams[i // 2] for i in range(4)])
    )
