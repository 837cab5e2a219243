"""W + alpha P delta Q^T against the dense products, reference and kernel, and its rounding."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keyhole.ops.backend import force
from keyhole.ops.lsp import blocks
from keyhole.ops.lsp.compress import compress
from keyhole.ops.lsp.decompress import decompress_add_
from keyhole.ops.lsp.projector import KINDS, Projector, identity_projector, random_projector
from keyhole.ops.rounding.bits import bits2d_reference
from keyhole.ops.rounding.round import stochastic_round_reference
from tests.ops.conftest import kernel_device_or_skip

SEED, STEP, OFFSET = 0xDEADBEEFCAFEBABE, 4_000_000_000, (1 << 33) + 12_347


def problem(
    kinds: tuple[str, str], m: int, n: int, d: int, r: int, device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, Projector, Projector]:
    """w, delta, P, Q."""
    p, q = random_projector(kinds[0], m, d, r, seed=1), random_projector(kinds[1], n, d, r, seed=2)
    generator = torch.Generator().manual_seed(m + n)
    w_mn, delta_dd = torch.randn(m, n, generator=generator), torch.randn(p.d, q.d, generator=generator)
    return w_mn.to(device), delta_dd.to(device), p.to(device), q.to(device)


@settings(max_examples=12)
@given(
    kinds=st.tuples(*[st.sampled_from(sorted(KINDS))] * 2),
    m=st.integers(1, 80),
    n=st.integers(1, 80),
    d=st.integers(1, 80),
    r=st.integers(1, 12),
    kernel=st.booleans(),
)
@example(kinds=("blocks", "blocks"), m=150, n=140, d=32, r=4, kernel=True)
def test_equals_the_dense_products(kinds: tuple[str, str], m: int, n: int, d: int, r: int, kernel: bool) -> None:
    """Any two kinds and any shape, with weight decay; for certain, more than one strip and one tile of each kernel."""
    w_mn, delta_dd, p, q = problem(kinds, m, n, d, r, kernel_device_or_skip() if kernel else "cpu")
    expected = 0.9 * w_mn.double() - 0.3 * (p.dense_Rd().double() @ delta_dd.double() @ q.dense_Rd().double().T)
    with force("kernel" if kernel else "reference"):
        decompress_add_(w_mn, delta_dd, p, q, -0.3, keep=0.9)
    torch.testing.assert_close(w_mn, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choice", ["reference", "kernel"])
def test_identity_reproduces_the_gradient(kernel_device: torch.device, choice: str) -> None:
    p, q = identity_projector(40, kernel_device), identity_projector(150, kernel_device)
    grad_mn, w_mn = torch.randn(40, 150, device=kernel_device), torch.zeros(40, 150, device=kernel_device)
    with force(choice):
        assert compress(grad_mn[:0], q).shape == (0, 150)
        half_mn = compress(grad_mn, q)
        s_dd = compress(half_mn.T.contiguous(), p).T.contiguous()
        decompress_add_(w_mn, s_dd, p, q, 1.0)
    assert torch.equal(w_mn, grad_mn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind, choice", [("blocks", "reference"), ("blocks", "kernel"), ("free", "reference")])
def test_stochastic_rounding_is_by_element(
    kernel_device: torch.device, kind: str, dtype: torch.dtype, choice: str
) -> None:
    w_mn, delta_dd, p, q = problem((kind, kind), 70, 140, 32, 4, kernel_device)
    w_mn = w_mn.to(dtype)
    exact_mn = w_mn.float()
    with force(choice):
        decompress_add_(exact_mn, delta_dd, p, q, 1e-3)
        decompress_add_(w_mn, delta_dd, p, q, 1e-3, rounding="stochastic", offset=OFFSET, seed=SEED, step=STEP)
    bits = bits2d_reference(70, 140, offset=OFFSET, seed=SEED, step=STEP, device=torch.device("cpu"))
    assert torch.equal(w_mn.cpu(), stochastic_round_reference(exact_mn.cpu(), bits, dtype))


@pytest.mark.parametrize("group", [8, 12])
def test_lanes_per_iteration_do_not_change_the_bits(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """Two strips, the second one cut off in a lane; blocks that end at the ends of lanes, and blocks that do not."""
    w_mn, delta_dd, p, q = problem(("blocks", "blocks"), 150, 40, -(-150 // group) * 4, 4, kernel_device)
    assert p.group == group
    found, how = [], {"rounding": "stochastic", "offset": OFFSET, "seed": SEED, "step": STEP}
    for unroll in (1, 2, 4, 8):
        monkeypatch.setattr(blocks, "UNROLL", unroll)
        new_mn = w_mn.bfloat16()
        with force("kernel"):
            decompress_add_(new_mn, delta_dd, p, q, 1e-3, **how)
        found.append(new_mn)
    assert all(torch.equal(new_mn, found[0]) for new_mn in found[1:])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind, choice", [("blocks", "reference"), ("blocks", "kernel"), ("free", "reference")])
def test_a_step_that_is_not_finite_leaves_the_weight(
    kernel_device: torch.device, kind: str, rounding: str, choice: str
) -> None:
    w_mn, delta_dd, p, q = problem((kind, kind), 40, 70, 16, 4, kernel_device)
    w_mn = w_mn.bfloat16()
    before = w_mn.clone()
    with force(choice):
        decompress_add_(w_mn, delta_dd.fill_(float("nan")), p, q, -0.3, keep=0.9, rounding=rounding)
    assert torch.equal(w_mn, before)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("m, n, d, r", [(4096, 4096, 2048, 4), (11_008, 4096, 512, 4), (4096, 11_008, 512, 16)])
def test_gpu_on_a_real_layer(cuda: torch.device, kind: str, m: int, n: int, d: int, r: int) -> None:
    w_mn, delta_dd, p, q = problem((kind, kind), m, n, d, r, cuda)
    w_mn = w_mn.bfloat16()
    again_mn = w_mn.clone()
    dense = p.dense_Rd().double() @ delta_dd.double() @ q.dense_Rd().double().T
    expected = w_mn.double() - 0.01 * dense
    for each in (w_mn, again_mn):
        decompress_add_(each, delta_dd, p, q, -0.01, rounding="stochastic", offset=OFFSET, seed=SEED, step=STEP)
    assert torch.equal(w_mn, again_mn)
    assert ((w_mn.double() - expected).abs() <= expected.abs() * 2**-7 + 1e-5).all()
