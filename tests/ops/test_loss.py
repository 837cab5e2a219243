"""Cross entropy in chunks of the vocabulary against torch's, reference and kernel."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from keyhole.ops.backend import INTERPRETED, force
from keyhole.ops.loss import RunningNLL

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernel = pytest.param("kernel", marks=pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs Triton"))


@pytest.mark.parametrize("choice", ["reference", kernel])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("tokens, vocabulary, chunk", [(5, 99, 99), (7, 1000, 130), (3, 9000, 8999), (1, 10, 1)])
def test_loss_and_gradient_in_chunks(
    choice: str, dtype: torch.dtype, per_token: bool, tokens: int, vocabulary: int, chunk: int
) -> None:
    """Any chunking, over the logits themselves: torch's numbers of all logits. One scale on the device, or one per
    token, some of them negative as those of wrong candidates."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (30 * torch.randn(tokens, vocabulary, generator=generator)).to(dtype).to(DEVICE).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(DEVICE)
    scale = torch.randn(tokens, generator=generator).to(DEVICE) if per_token else torch.tensor(0.37, device=DEVICE)
    expected = F.cross_entropy(logits.float(), targets, reduction="none")
    (expected * scale).sum().backward()
    made = logits.detach().clone()
    with force(choice):
        running = RunningNLL(targets)
        for first in range(0, vocabulary, chunk):
            for part, rows in zip(running.split(2), made[:, first : first + chunk].split(2), strict=True):
                part.add(rows, first)
        torch.testing.assert_close(running.nll_N(), expected, rtol=1e-5, atol=1e-4)
        for first in range(0, vocabulary, chunk):
            scales = scale.split(2) if per_token else itertools.repeat(scale)
            for part, rows, one in zip(running.split(2), made[:, first : first + chunk].split(2), scales, strict=False):
                part.grad_(rows, first, one)
    rtol = 1e-4 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(made, logits.grad, rtol=rtol, atol=1e-7)


@pytest.mark.gpu
def test_gpu_gradient_of_a_real_head(cuda: torch.device) -> None:
    """2048 tokens, 32,000 rows in bfloat16 and in three chunks: torch's gradient to bfloat16's rounding."""
    logits = (4 * torch.randn(2048, 32_000, device=cuda)).bfloat16().requires_grad_()
    targets = torch.randint(32_000, (2048,), device=cuda)
    F.cross_entropy(logits.float(), targets, reduction="sum").backward()
    running, made = RunningNLL(targets), logits.detach().clone()
    for visit in (running.add, running.grad_):
        for first in range(0, 32_000, 12_000):
            visit(made[:, first : first + 12_000], first)
    torch.testing.assert_close(made, logits.grad, rtol=2**-7, atol=1e-7)
