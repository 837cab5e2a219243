"""A ReLU with what its input lacks and with the sketch of its result: against float64, the reference, and in place."""

import pytest
import torch

from keyhole.ops.backend import force
from keyhole.ops.lowrank import relu
from keyhole.ops.lowrank.correct import correct
from keyhole.ops.lowrank.product import narrow
from keyhole.ops.lowrank.relu import narrow_relu, narrow_relu_reference
from tests.matrix import in_every_run
from tests.ops.lowrank.lacking import close, in_float64, problem

DTYPES = [torch.float32, torch.bfloat16]
WIDTH = relu.COLUMNS + 70  # a tile, and a part of one; test_parts_are_added_in_order has many


def columns(device: torch.device, dtype: torch.dtype, rank: int, width: int) -> torch.Tensor:
    return torch.randn(rank, width, generator=torch.Generator().manual_seed(rank)).to(device, dtype)


def same_bits(found: tuple, expected: tuple) -> bool:
    bits = [(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True)]
    return all(torch.equal(a, b) for a, b in bits)


@in_every_run(lambda dtype, rank, width: (dtype == torch.bfloat16) == (rank in (2, 3)) or width == 70)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("width", [70, WIDTH])
def test_a_relu_on_the_way(kernel_device: torch.device, dtype: torch.dtype, rank: int, width: int) -> None:
    """The bits of the ReLU, a nan included; the sketch is that of its result, and the reference's up to rounding."""
    y, v = problem(kernel_device, dtype, 1, 7, width, rank)[0], columns(kernel_device, dtype, rank, width)
    expected, q_expected = narrow_relu_reference(y, v)
    with force("kernel"):
        x, q = narrow_relu(y, v)
        assert torch.equal(x, expected) and q.dtype == torch.float32 and q.is_contiguous()
        torch.testing.assert_close(q, narrow(x, v), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(q, q_expected, rtol=1e-5, atol=1e-4)
        y[3, 5] = torch.nan
        x, q = narrow_relu(y, v)
    assert x[3, 5].isnan() and q[3].isnan().all() and int(q.isnan().sum()) == rank
    assert torch.equal(x.nan_to_num(), torch.relu(y).nan_to_num())


@in_every_run(
    lambda dtype, rank, lacks_rank, looks: (
        (dtype == torch.bfloat16 if rank == 2 else looks == 2) or (dtype == torch.float32 and looks == 3)
    )
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank, lacks_rank", [(1, 1), (2, 2), (4, 3), (2, 6), (6, 2), (6, 5)])
@pytest.mark.parametrize("looks, rows", [(1, 7), (2, 8), (3, 5)])
def test_a_product_that_lacks_something(
    kernel_device: torch.device, dtype: torch.dtype, rank: int, lacks_rank: int, looks: int, rows: int
) -> None:
    """y is left alone. A nan stays a nan; the sketch is that of rounded numbers."""
    width = WIDTH if rank == 2 else 70
    y, _, lacks = problem(kernel_device, dtype, looks, rows, width, lacks_rank, bias=rank != 1)
    v, before = columns(kernel_device, dtype, rank, width), y.clone()
    expected, q_expected = narrow_relu_reference(y, v, lacks)
    with force("kernel"):
        x, q = narrow_relu(y, v, lacks)
        assert torch.equal(y, before)
        close(x, torch.relu(in_float64(y, lacks)))
        torch.testing.assert_close(q, narrow(x, v), rtol=1e-5, atol=1e-4)
        assert float((x == expected).float().mean()) > (0.97 if dtype == torch.bfloat16 else 0.4)
        limit = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(q, q_expected, rtol=limit, atol=limit * float(q_expected.abs().max()))
        y[3, 5] = torch.nan
        x, q = narrow_relu(y, v, lacks)
    assert x[3, 5].isnan() and int(x.isnan().sum()) == 1 and q[3].isnan().all() and int(q.isnan().sum()) == rank


@in_every_run(lambda choice, dtype, rank, width: "reference" == choice or (dtype == torch.bfloat16) == (rank != 2))
@pytest.mark.parametrize("choice", ["reference", "kernel"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank, lacks_rank, width", [(2, 2, 70), (2, 2, WIDTH), (3, 5, WIDTH), (5, 2, 70)])
def test_where_it_is_added_changes_no_bit(
    kernel_device: torch.device, choice: str, dtype: torch.dtype, rank: int, lacks_rank: int, width: int
) -> None:
    """In place and then read, or on the way: the same ReLU and sketch, and the ReLU is PyTorch's."""
    y, _, lacks = problem(kernel_device, dtype, 2, 7, width, lacks_rank)
    v = columns(kernel_device, dtype, rank, width)
    with force(choice):
        found = narrow_relu(y, v, lacks)
        assert same_bits(found, narrow_relu(y, v, lacks))
        correct(y, *lacks, out=y)
        assert same_bits(found, narrow_relu(y, v)) and torch.equal(found[0], torch.relu(y))


@pytest.mark.parametrize("tile", [(4, 64, 1), (32, 256, 8), (8, 1024, 2)])
def test_tiles_change_no_bit_of_the_relu(
    kernel_device: torch.device, tile: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sketch up to rounding."""
    y, _, lacks = problem(kernel_device, torch.bfloat16, 2, 11, 200, 2)
    v = columns(kernel_device, torch.bfloat16, 2, 200)
    with force("kernel"):
        expected, q_expected = narrow_relu(y, v, lacks)
        for name, value in zip(("ROWS", "COLUMNS", "WARPS"), tile, strict=True):
            monkeypatch.setattr(relu, name, value)
        x, q = narrow_relu(y, v, lacks)
    assert torch.equal(x, expected)
    torch.testing.assert_close(q, q_expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("numbers, at_once", [(64, 4), (16, 1), (256, 2), (64, 16)])
def test_parts_are_added_in_order(
    kernel_device: torch.device, numbers: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of an ascending sum of what each tile has by itself, whatever a program adds at once."""
    monkeypatch.setattr(relu, "COLUMNS", 32)
    monkeypatch.setattr(relu, "NUMBERS", numbers)
    monkeypatch.setattr(relu, "AT_ONCE", at_once)
    y, _, lacks = problem(kernel_device, torch.float32, 2, 9, 7 * 32 - 5, 2)
    v = columns(kernel_device, torch.float32, 3, y.shape[1])
    with force("kernel"):
        x, q = narrow_relu(y, v, lacks)
        total = torch.zeros_like(q)
        for first in range(0, y.shape[1], 32):
            last = min(first + 32, y.shape[1])
            part = narrow_relu(x[:, first:last].contiguous(), v[:, first:last].contiguous())
            assert torch.equal(part[0], x[:, first:last])
            total += part[1]
    assert torch.equal(q, total)


def test_no_rows(kernel_device: torch.device) -> None:
    y, _, lacks = problem(kernel_device, torch.float32, 2, 0, 8, 2)
    with force("kernel"):
        x, q = narrow_relu(y, torch.randn(2, 8, device=kernel_device), lacks)
    assert x.shape == (0, 8) and q.shape == (0, 2)


def test_shapes_that_do_not_fit_are_refused() -> None:
    y, _, lacks = problem(torch.device("cpu"), torch.float32, 2, 4, 8, 2)
    v = torch.randn(2, 8)
    for wrong in ((y[:-1], v, lacks), (y.t(), v), (y, v.double()), (y, v[:, :4]), (y[:, :4].contiguous(), v[:, :4])):
        with pytest.raises(AssertionError):
            narrow_relu(*wrong)
    with pytest.raises(AssertionError):
        narrow_relu(y, v, (lacks[0], lacks[1][:, :, :4].contiguous(), None))


@pytest.mark.gpu
@pytest.mark.parametrize("rank, lacks_rank", [(1, 1), (2, 2), (4, 4), (2, 8), (8, 2)])
@pytest.mark.parametrize("rows, width", [(1024, 5120), (300, 576), (77, 20480), (33, 1530)])
def test_on_the_gpu(cuda: torch.device, rank: int, lacks_rank: int, rows: int, width: int) -> None:
    """Compiled, at the sizes of models: against float64; all launches have the same bits, captured ones too, and those
    of numbers that were added in place before."""
    y, _, lacks = problem(cuda, torch.bfloat16, 2, rows, width, lacks_rank)
    v = columns(cuda, torch.bfloat16, rank, width)
    found = narrow_relu(y, v, lacks)
    close(found[0], torch.relu(in_float64(y, lacks)))
    in_double = found[0].double() @ v.double().t()
    torch.testing.assert_close(found[1].double(), in_double, rtol=1e-4, atol=1e-5 * width)
    assert all(same_bits(narrow_relu(y, v, lacks), found) for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = narrow_relu(y, v, lacks)
    for _ in range(2):
        captured[1].zero_()
        graph.replay()
        assert same_bits(captured, found)
    correct(y, *lacks, out=y)
    assert same_bits(narrow_relu(y, v), found) and torch.equal(torch.relu(y), found[0])
