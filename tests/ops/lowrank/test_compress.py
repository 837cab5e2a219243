"""Sums of low rank in fewer terms: against a plain SVD, whatever the shapes."""

import pytest
import torch

from keyhole.ops.lowrank.compress import compressed


def factors(k: int, outputs: int, inputs: int, falls: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(k + outputs)
    size_k1 = torch.tensor([falls**i for i in range(k)])[:, None]
    return torch.randn(k, outputs, generator=generator) * size_k1, torch.randn(k, inputs, generator=generator)


@pytest.mark.parametrize("share", [0.0, 1e-3, 1e-2, 0.3])
@pytest.mark.parametrize(
    "k, outputs, inputs, falls", [(6, 50, 40, 0.3), (16, 8, 40, 1.0), (16, 40, 8, 1.0), (60, 8, 8, 0.9)]
)
def test_equals_the_svd(k: int, outputs: int, inputs: int, falls: float, share: float) -> None:
    """The norm, and as many terms as the bound requires, no fewer and no more; also with more terms than the matrix has
    rows or columns, where at most these are left."""
    a, v = factors(k, outputs, inputs, falls)
    whole = a.double().t() @ v.double()
    singular, n = torch.linalg.svdvals(whole), min(k, outputs, inputs)
    a_m, v_m, lost, norm = compressed(a, v, share, 0.0, 8.0)
    m = len(a_m)
    assert norm == pytest.approx(float(whole.norm()), rel=1e-10) and len(v_m) == m <= n
    assert m == n or float(singular[m:].norm()) <= max(share, 1e-5) * norm
    assert share == 0.0 or float(singular[m - 1 :].norm()) > share * norm  # no fewer would do
    assert float((a_m.double().t() @ v_m.double() - whole).norm()) == pytest.approx(lost, rel=1e-5, abs=2e-6 * norm)
    spent = compressed(a, v, share, (share * norm) ** 2, 8.0)  # earlier sums have lost it all
    assert len(spent[0]) == len(compressed(a, v, 0.0, 0.0, 8.0)[0])


def test_nothing_learned_is_a_sum_of_nothing() -> None:
    _, v = factors(4, 8, 8, 1.0)
    a_m, v_m, lost, norm = compressed(torch.zeros(4, 8), v, 0.0, 0.0, 1.0)
    assert norm == lost == 0.0 and len(a_m) == len(v_m) == 1 and not a_m.any()
