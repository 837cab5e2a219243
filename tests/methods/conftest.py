"""What makes the runs of tests/methods cheap, and changes no number of them.

oneDNN is off: products of a few dozen numbers spend four fifths of their time in its set-up. What is compared here
(streamed with resident, ours with torch's) goes through the same products on both sides. The runs of tests/training,
tests/demo and tests/cli have oneDNN on, as users do.

Noise is drawn once a test: z is a pure function of (seed, step, direction, elements), which tests/ops holds it to, and
a step asks for it to perturb, the next one to update, and both again in the streamed twin.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from keyhole.ops.noise import tiles
from keyhole.ops.zo import flat as zo


@pytest.fixture(autouse=True)
def plain_products() -> Iterator[None]:
    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    yield
    torch.backends.mkldnn.enabled = before


@pytest.fixture(autouse=True)
def noise_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers use up what they are given, so each gets a copy."""
    draw = lru_cache(maxsize=4096)(tiles.chunk_noise_reference)

    def drawn(start: int, n: int, **options: Any) -> torch.Tensor:
        return draw(start, n, **dict(sorted(options.items()))).clone()

    monkeypatch.setattr(zo, "chunk_noise_reference", drawn)
