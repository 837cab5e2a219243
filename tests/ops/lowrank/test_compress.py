"""Sums of low rank in fewer terms: against a plain SVD, whatever the shapes, and in integers whatever the order."""

import math

import pytest
import torch

from keyhole.ops.lowrank.compress import Cut, combine, cuts, fewest, gram
from keyhole.ops.lowrank.eigen import eigen, root, tournament
from keyhole.ops.lowrank.exact import LONGEST, exact_product


def factors(k: int, outputs: int, inputs: int, falls: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(k + outputs)
    size_k1 = torch.tensor([falls**i for i in range(k)])[:, None]
    return torch.randn(k, outputs, generator=generator) * size_k1, torch.randn(k, inputs, generator=generator)


def cut_of(a: torch.Tensor, v: torch.Tensor, k: int) -> Cut:
    return cuts(gram(a, k)[None], gram(v, k)[None])[0]


@pytest.mark.parametrize("k, outputs, inputs, falls", [(6, 50, 40, 0.3), (16, 8, 40, 1.0), (16, 40, 8, 1.0)])
def test_equals_the_svd(k: int, outputs: int, inputs: int, falls: float) -> None:
    """Singular values, the norm, and the loss of every number of terms are those of the whole matrix; also with more
    terms than the matrix has rows or columns, where at most these are left."""
    a, v = factors(k, outputs, inputs, falls)
    whole, cut = a.double().t() @ v.double(), cut_of(a, v, k + 3)
    singular = torch.linalg.svdvals(whole)
    found = torch.tensor(cut.singular, dtype=torch.float64)
    n = min(k, outputs, inputs)
    torch.testing.assert_close(found[:n], singular[:n], rtol=1e-8, atol=1e-9 * float(singular[0]))
    assert cut.norm == pytest.approx(float(whole.norm()), rel=1e-10)
    for most in (0.0, 1e-3, 1e-2, 0.3):
        m, lost = cut.rank_within(most * cut.norm)
        assert m <= n and (m == n or float(singular[m:].norm()) <= max(most, 1e-5) * cut.norm)
        assert most == 0.0 or float(singular[m - 1 :].norm()) > most * cut.norm  # no fewer would do
        made = combine(cut.by_a_kk[:m], a, 0.125).double().t() @ combine(cut.by_v_kk[:m], v, 8.0).double()
        assert float((made - whole).norm()) == pytest.approx(lost, rel=1e-5, abs=2e-6 * cut.norm)


@pytest.mark.parametrize("outputs, inputs", [(8, 30), (30, 8), (8, 8)])
def test_no_more_terms_than_the_shorter_side(outputs: int, inputs: int) -> None:
    """Many terms of a small matrix are the same matrix in min(O, I) terms, and its singular values are those of all of
    them; few terms stay as they are."""
    a, v = factors(60, outputs, inputs, 0.9)
    whole, (few_a, few_v) = a.double().t() @ v.double(), fewest(a, v)
    assert len(few_a) == len(few_v) == 8
    torch.testing.assert_close(few_a.t() @ few_v, whole, rtol=0, atol=1e-10 * float(whole.norm()))
    found = torch.tensor(cut_of(few_a, few_v, 8).singular, dtype=torch.float64)
    torch.testing.assert_close(found, torch.linalg.svdvals(whole), rtol=1e-8, atol=1e-9 * float(whole.norm()))
    assert fewest(a[:8], v[:8])[0].data_ptr() == a.data_ptr()


def test_nothing_learned_is_a_sum_of_nothing() -> None:
    _, v = factors(4, 8, 8, 1.0)
    cut = cut_of(torch.zeros(4, 8), v, 4)
    assert cut.norm == 0.0 and cut.rank_within(0.0) == (0, 0.0)


def test_products_do_not_depend_on_the_order_of_their_sums() -> None:
    """Terms in any order, and in other pieces: the same bits, close to the product of the library."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, LONGEST, generator=generator), torch.randn(4, LONGEST, generator=generator) * 1e-5
    expected = exact_product(x, y)
    order = torch.randperm(LONGEST, generator=generator)
    assert torch.equal(exact_product(x[:, order], y[:, order]), expected)
    assert torch.equal(exact_product(y, x), expected.t())
    torch.testing.assert_close(expected, x.double() @ y.double().t(), rtol=0, atol=1e-10 * float(expected.abs().max()))
    longer = exact_product(torch.cat([x, x], 1), torch.cat([y, y], 1))
    assert torch.equal(longer, expected + expected)


@pytest.mark.parametrize("k", [1, 2, 5, 12])
def test_eigenvectors(k: int) -> None:
    """A = E^T diag(d) E with orthonormal rows, and no matrix depends on its neighbours in a batch."""
    x = torch.randn(3, k, k // 2 + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    a = x @ x.mT
    d, e = eigen(a)
    torch.testing.assert_close(e.mT @ (d[:, :, None] * e), a, rtol=0, atol=1e-12 * float(a.abs().max()))
    torch.testing.assert_close(e @ e.mT, torch.eye(k, dtype=torch.float64).expand(3, k, k), rtol=0, atol=1e-12)
    assert torch.equal(eigen(a[1:2])[1], e[1:2])


def test_roots_are_rounded_correctly() -> None:
    """As the processor's own; PyTorch's vector library on x86 is off by the last bit for 7 of 1,000."""
    x = torch.rand(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 100
    assert root(x.view(100, 100).t()).t().flatten().tolist() == [math.sqrt(value) for value in x.tolist()]


def test_a_tournament_meets_every_pair_once() -> None:
    rounds = tournament(8)
    assert all(sorted(p + q) == list(range(8)) for p, q in rounds)
    assert len({pair for p, q in rounds for pair in zip(p, q, strict=True)}) == 28


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_gives_the_bits_of_the_cpu() -> None:
    """Products, eigenvectors and the terms that are made of them."""
    for k, outputs, inputs, falls in ((6, 50, 40, 0.3), (16, 8, 40, 1.0), (33, 20_000, 300, 0.9)):
        a, v = factors(k, outputs, inputs, falls)
        here, there = cut_of(a, v, k), cut_of(a.cuda(), v.cuda(), k)
        assert here.singular == there.singular
        for by, x in (("by_a_kk", a), ("by_v_kk", v)):
            made = combine(getattr(there, by), x.cuda(), 2.0).cpu()
            assert torch.equal(combine(getattr(here, by), x, 2.0), made)
