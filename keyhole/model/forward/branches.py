"""Passes that run beside each other on the GPU: one stream per look, forked and joined at every unit.

The kernels of a short batch occupy a part of the GPU, and each waits for the one before. The two passes of a pair of
looks do not depend on each other. While a step is captured as a CUDA graph (methods/zo/recorded_step.py), each look is
therefore launched on a stream of its own:

    conductor    perturb unit u --+-------------------+-- perturb unit u + 1 --+-- ..
    stream 0                      +-- passes with + --+                        +-- ..
    stream 1                      +-- passes with - --+                        +-- ..

A unit's copies are written before the fork and overwritten after the join. Before the first unit the looks run one
after the other, because the embedded rows of both are computed in the pass of the first.

Memory that is freed is reused by the stream in which it was allocated, in the order in which the host launches. That is
safe: within a fork the host launches stream 0 before stream 1, stream 1 may free what stream 0 allocated (its embedded
rows) but not the other way round, and stream 0 allocates again only after the join.
"""

import torch


class Branches:
    """count: streams, one per look of a pair; 0: everything stays on the current stream."""

    def __init__(self, device: torch.device | None = None, count: int = 0) -> None:
        self.streams = [torch.cuda.Stream(device) for _ in range(count)]
        self.forked: list[torch.cuda.Stream] = []

    def of_passes(self, looks: list[list[range]]) -> dict[int, torch.cuda.Stream]:
        """The stream of each pass. looks: of each pair, the passes of its looks."""
        sides = [side for pair in looks for side in enumerate(pair)]
        return {index: self.streams[side] for side, passes in sides for index in passes} if self.streams else {}

    def fork(self, side: int) -> None:
        """What look `side` launches from now on follows everything that the current stream was given."""
        if self.streams:
            stream = self.streams[side]
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            self.forked.append(stream)

    def join(self) -> None:
        """What the current stream is given from now on follows everything that was launched since the forks."""
        for stream in self.forked:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self.forked.clear()
