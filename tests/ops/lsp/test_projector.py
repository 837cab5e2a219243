"""Sparse projectors: shape, sparsity, balance, orthonormality."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.ops.lsp.projector import KINDS, identity_projector, random_projector


@given(kind=st.sampled_from(sorted(KINDS)), rows=st.integers(1, 300), d=st.integers(1, 400), r=st.integers(1, 20))
def test_every_row_has_r_numbers_in_different_columns(kind: str, rows: int, d: int, r: int) -> None:
    p = random_projector(kind, rows, d, r, seed=rows)
    assert p.rows == rows and 1 <= p.d <= min(d, rows) and 1 <= p.r <= min(r, p.d)
    columns_Rr = p.columns_Rr()
    assert columns_Rr.min() >= 0 and columns_Rr.max() < p.d
    assert all(len(set(line)) == p.r for line in columns_Rr.tolist())
    assert torch.equal(p.dense_Rd().gather(1, columns_Rr), p.values_Rr)


@pytest.mark.parametrize("rows, d, r", [(256, 64, 8), (256, 64, 64), (100, 32, 4), (37, 37, 5)])
def test_blocks_are_orthonormal(rows: int, d: int, r: int) -> None:
    p = random_projector("blocks", rows, d, r, seed=0)
    gram_dd = p.dense_Rd().T @ p.dense_Rd()
    missing = max(0, p.r - (rows - (p.d // p.r - 1) * p.group))
    expected_d = torch.ones(p.d)
    expected_d[p.d - missing :] = 0
    torch.testing.assert_close(gram_dd, expected_d.diag(), rtol=0, atol=1e-5)


def test_same_seed_same_projector_and_moves() -> None:
    a, b, c = (random_projector("free", 50, 20, 3, seed=s) for s in (1, 1, 2))
    assert torch.equal(a.dense_Rd(), b.dense_Rd()) and not torch.equal(a.dense_Rd(), c.dense_Rd())
    doubled = a.with_values(a.values_Rr * 2).to("cpu")
    assert torch.equal(doubled.dense_Rd(), 2 * a.dense_Rd())
    assert all(torch.equal(identity_projector(7, kind=kind).dense_Rd(), torch.eye(7)) for kind in KINDS)
