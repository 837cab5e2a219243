"""X P against the dense product, reference and kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.ops.backend import force
from keyhole.ops.lsp.compress import compress
from keyhole.ops.lsp.projector import KINDS, random_projector
from tests.ops.conftest import kernel_device_or_skip


@settings(max_examples=10)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    tokens=st.integers(1, 100),
    rows=st.integers(1, 200),
    d=st.integers(1, 150),
    r=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kernel=st.booleans(),
)
def test_equals_the_dense_product(
    kind: str, tokens: int, rows: int, d: int, r: int, dtype: torch.dtype, kernel: bool
) -> None:
    device = kernel_device_or_skip().type if kernel else "cpu"
    p = random_projector(kind, rows, d, r, seed=tokens, device=device)
    x_TR = torch.randn(tokens, rows + 3, generator=torch.Generator().manual_seed(rows)).to(dtype).to(device)[:, :rows]
    with force("kernel" if kernel else "reference"):
        made = compress(x_TR, p)
        made_fp32 = compress(x_TR, p, torch.float32)
    expected = (x_TR.double() @ p.dense_Rd().double()).float()
    assert made.dtype == dtype and made.shape == (tokens, p.d)
    rtol = 2e-3 if device == "cuda" and dtype != torch.float32 else 1e-5  # TF32 in the product of blocks
    torch.testing.assert_close(made_fp32, expected, rtol=rtol, atol=10 * rtol)
    torch.testing.assert_close(made.float(), expected, rtol=2**-7 if dtype != torch.float32 else rtol, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("rows, d, r", [(4096, 512, 4), (11_008, 2048, 4), (4096, 2048, 16)])
def test_gpu_on_a_real_layer(cuda: torch.device, kind: str, rows: int, d: int, r: int) -> None:
    p = random_projector(kind, rows, d, r, seed=0, device=cuda)
    x_TR = torch.randn(4096, rows, device=cuda).bfloat16()
    made = compress(x_TR, p, torch.float32)
    assert torch.equal(made, compress(x_TR, p, torch.float32))
    expected = x_TR.double() @ p.dense_Rd().double()
    assert (made - expected).norm() / expected.norm() < 1e-3
