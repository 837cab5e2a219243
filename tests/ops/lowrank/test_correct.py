"""What a product lacks, added by the kernel that reads its output: against float64, the reference, and in place."""

import pytest
import torch

from keyhole.ops.backend import force
from keyhole.ops.lowrank.correct import correct, correct_reference
from keyhole.ops.lowrank.product import widen
from tests.ops.lowrank.lacking import close, in_float64, problem

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("choice", ["reference", "kernel"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", range(1, 10))
def test_equals_float64(kernel_device: torch.device, choice: str, dtype: torch.dtype, rank: int) -> None:
    """Shapes that no tile divides, 1 to 3 looks, with and without a bias and a residual."""
    looks = 1 + rank % 3
    for width, bias in ((70, True), (600, False)) if rank < 4 else ((70, rank % 2 == 0),):
        y, residual, lacks = problem(kernel_device, dtype, looks, 11, width, rank, bias)
        before = y.clone()
        with force(choice):
            plain, added = correct(y, *lacks), correct(y, *lacks, residual)
        expected = in_float64(y, lacks)
        assert torch.equal(y, before) and plain.dtype == added.dtype == dtype
        close(plain, expected)
        close(added, expected + residual.double(), 2)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("rank", [1, 2, 3, 6])
def test_the_kernel_equals_the_reference(kernel_device: torch.device, dtype: torch.dtype, rank: int) -> None:
    """Up to the order of a sum of few terms: in 16 bit few numbers round to the other side."""
    y, residual, lacks = problem(kernel_device, dtype, 2, 19, 70, rank)
    for other in (None, residual):
        with force("kernel"):
            found = correct(y, *lacks, other)
        expected = correct_reference(y, *lacks, other)
        limit = max(2e-6, 2 * torch.finfo(dtype).eps)
        torch.testing.assert_close(found, expected, rtol=limit, atol=4 * limit)
        assert dtype == torch.float32 or float((found == expected).float().mean()) > 0.97


@pytest.mark.parametrize("choice", ["reference", "kernel"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [2, 5])
def test_where_it_is_added_changes_no_bit(
    kernel_device: torch.device, choice: str, dtype: torch.dtype, rank: int
) -> None:
    """In place and then read, or on the way."""
    y, residual, lacks = problem(kernel_device, dtype, 2, 19, 70, rank)
    with force(choice):
        added = correct(y, *lacks, residual)
        assert correct(y, *lacks, out=y) is y
        assert torch.equal(added, residual + y)


def test_the_small_part_is_that_of_widen(kernel_device: torch.device) -> None:
    """y = 0, corrected in float32, has the bits of `widen`."""
    for rank in (2, 5):
        y, _, lacks = problem(kernel_device, torch.float32, 2, 19, 70, rank)
        with force("kernel"):
            assert torch.equal(correct(y.zero_(), *lacks), widen(*lacks, torch.float32).view(y.shape))


def test_no_rows(kernel_device: torch.device) -> None:
    y, residual, lacks = problem(kernel_device, torch.float32, 2, 0, 8, 2)
    with force("kernel"):
        assert correct(y, *lacks, residual).shape == (0, 8)


def test_shapes_that_do_not_fit_are_refused() -> None:
    y, residual, lacks = problem(torch.device("cpu"), torch.float32, 2, 4, 8, 2)
    for wrong in ((y[:-1], *lacks), (y.t(), *lacks), (y, *lacks, residual.double()), (y, *lacks, residual[:, :4])):
        with pytest.raises(AssertionError):
            correct(*wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 2, 4, 8])
@pytest.mark.parametrize("rows, width", [(1024, 5120), (300, 576), (77, 20480)])
def test_on_the_gpu(cuda: torch.device, rank: int, rows: int, width: int) -> None:
    """Compiled, at the sizes of models: against float64; where it is added changes no bit; all launches have the same
    bits."""
    y, residual, lacks = problem(cuda, torch.bfloat16, 2, rows, width, rank)
    added = correct(y, *lacks, residual)
    close(added, in_float64(y, lacks) + residual.double(), 2)
    assert all(torch.equal(correct(y, *lacks, residual), added) for _ in range(3))
    correct(y, *lacks, out=y)
    assert torch.equal(residual + y, added)
