"""Passes that run beside each other on the GPU: one stream per look, forked and joined at every unit.

The kernels of a short batch occupy a part of the GPU, and each waits for the one before. The passes of different looks
do not depend on each other. While a step is captured as a CUDA graph (methods/zo/recorded_step.py), each look is
therefore launched on a stream of its own:

    conductor    perturb unit u --+-------------------+-- perturb unit u + 1 --+-- ..
    stream 0                      +-- passes with + --+                        +-- ..
    stream 1                      +-- passes with - --+                        +-- ..

A unit's copies are written before the fork and overwritten after the join. Several pairs of looks run beside each other
if each has copies of its own, else one pair after the other. Before the first unit the looks run one after the other,
because the embedded rows of a pair are computed in the pass of its first look.

Memory that is freed is reused by the stream in which it was allocated, in the order in which the host launches. That is
safe: between fork and join the host launches streams in ascending order, a stream may free what one before it allocated
(its embedded rows) but not the other way round, and no stream allocates again before the join.
"""

import torch


class Branches:
    """pairs: of looks that run beside each other; 0: everything stays on the current stream."""

    def __init__(self, device: torch.device | None = None, pairs: int = 0) -> None:
        self.pairs, self.streams = pairs, [torch.cuda.Stream(device) for _ in range(2 * pairs)]
        self.forked: list[torch.cuda.Stream] = []

    def stream(self, pair: int, side: int) -> torch.cuda.Stream:
        """The stream of a look. pair: its number among those that are visited."""
        return self.streams[2 * (pair % self.pairs) + side]

    def of_passes(self, looks: list[list[range]]) -> dict[int, torch.cuda.Stream]:
        """The stream of each pass. looks: of each pair, the passes of its looks."""
        if not self.pairs:
            return {}
        sides = [(pair, side) for pair, by_look in enumerate(looks) for side in range(len(by_look))]
        return {index: self.stream(pair, side) for pair, side in sides for index in looks[pair][side]}

    def fork(self, pair: int, side: int) -> None:
        """What this look launches from now on follows everything that the current stream was given."""
        if self.pairs:
            stream = self.stream(pair, side)
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            self.forked.append(stream)

    def join(self) -> None:
        """What the current stream is given from now on follows everything that was launched since the forks."""
        for stream in self.forked:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self.forked.clear()
