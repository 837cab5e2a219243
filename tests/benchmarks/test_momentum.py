"""benchmarks/momentum.py: a sum over the last steps is what a stored momentum would be."""

from collections import deque

import torch

from benchmarks import momentum


def test_a_window_is_the_usual_recursion_cut_off() -> None:
    """Within the window m <- b m + (1 - b) g z; Adam's direction is its m and v with both corrections."""
    generator = torch.Generator().manual_seed(0)
    pairs = [(float(i + 1), torch.randn(5, generator=generator)) for i in range(8)]
    m, v, beta, beta2 = torch.zeros(5), torch.zeros(5), 0.9, momentum.BETA2
    last: deque[tuple[float, torch.Tensor]] = deque(maxlen=momentum.RULES["adam"][0])
    for g, z in pairs:
        last.appendleft((g, z))
        m, v = beta * m + (1 - beta) * g * z, beta2 * v + (1 - beta2) * (g * z).square()
    torch.testing.assert_close(momentum.direction("momentum 0.9", last), m)
    adam = (m / (1 - beta**8)) / ((v / (1 - beta2**8)).sqrt() + 1e-8)
    torch.testing.assert_close(momentum.direction("adam", last), adam)
    torch.testing.assert_close(momentum.direction("plain", deque([pairs[0]])), pairs[0][0] * pairs[0][1])
