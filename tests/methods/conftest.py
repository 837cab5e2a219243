"""What makes the runs of tests/methods cheap, and changes no number of them (nor does tests/conftest.py).

oneDNN is off: products of a few dozen numbers spend four fifths of their time in its set-up. What is compared here
(streamed with resident, ours with torch's) goes through the same products on both sides. The runs of tests/training,
tests/demo and tests/cli have oneDNN on, as users do.
"""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def plain_products() -> Iterator[None]:
    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    yield
    torch.backends.mkldnn.enabled = before
