"""Cross entropy in chunks of the vocabulary against torch's, reference and kernel."""

import pytest
import torch
from torch.nn import functional as F

from keyhole.ops.backend import INTERPRETED, force
from keyhole.ops.loss import RunningNLL

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernel = pytest.param("kernel", marks=pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs Triton"))


@pytest.mark.parametrize("choice", ["reference", kernel])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, vocabulary, chunk", [(5, 99, 99), (7, 1000, 130), (3, 5000, 4999), (1, 10, 1)])
def test_equals_cross_entropy(choice: str, dtype: torch.dtype, tokens: int, vocabulary: int, chunk: int) -> None:
    """Any chunking gives torch's cross entropy of all logits, also when logits are large."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (30 * torch.randn(tokens, vocabulary, generator=generator)).to(dtype).to(DEVICE)
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(DEVICE)
    with force(choice):
        running = RunningNLL(targets)
        for first in range(0, vocabulary, chunk):
            for part, rows in zip(running.split(2), logits[:, first : first + chunk].split(2), strict=True):
                part.add(rows.contiguous(), first)
    expected = F.cross_entropy(logits.float(), targets, reduction="none")
    torch.testing.assert_close(running.nll_N(), expected, rtol=1e-5, atol=1e-4)


def test_no_tokens_is_no_loss() -> None:
    """A batch without trained tokens adds nothing and does not fail."""
    running = RunningNLL(torch.empty(0, dtype=torch.long))
    running.add(torch.empty(0, 10), 0)
    assert running.nll_N().sum() == 0
