"""Projectors on gradients of the embedded model: what learning gains, and GaLore at equal memory."""

from pathlib import Path

import pytest
import torch

from benchmarks.lsp_bias import bench_bias, equal_rank, gradients, one_line
from keyhole.ops.lsp.projector import KINDS


@pytest.fixture(scope="module")
def grads() -> list:
    return gradients((2, 3), every=5)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("d", [16, 32])
def test_learned_holds_better_than_its_start_and_galore(grads: list, kind: str, d: int) -> None:
    """r = 4, on gradients of batches it was not fitted to, GaLore in the same memory."""
    found = one_line(kind, d, 4, *grads)
    assert found["held_out"] < 0.95 * found["galore_held_out"] and found["held_out"] < 0.5 * found["random"]
    assert found["seen"] < found["held_out"] < 0.5


def test_memory_is_counted_as_in_the_paper() -> None:
    """(m + n) r numbers of projectors pay for (m + 3 n) rank of GaLore, whose projector is on the shorter side."""
    assert equal_rank(torch.Size((64, 64)), 4) == 2
    assert equal_rank(torch.Size((192, 64)), 16) == 256 * 16 // (64 + 3 * 192)


def test_the_table_is_written(tmp_path: Path) -> None:
    """A quick one, with all kinds in it."""
    text = bench_bias(out=tmp_path, quick=True, say=lambda line: None)
    assert all(f"| {kind} " in text for kind in KINDS) and (tmp_path / "lsp_bias_quick.json").exists()
