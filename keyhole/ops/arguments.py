"""What the ops that change weights ask of their arguments, said once.

Weights and gradients are contiguous, of one shape and device, in float32, bfloat16 or float16. Numbers that a kernel
reads or adds to (scale, sums, flags) are one-element tensors on the same device, so that nothing waits for the host.
Whoever breaks this has a bug: asserts, no errors for users. The bounds of the index space are in ops/noise/tiles.py (`check`).
"""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VECTOR = 8  # alignment, in elements, that lets the compiler widen memory accesses


def float32(value: float) -> float:
    """The nearest float32, so that reference and kernel start from the same number."""
    return torch.tensor(value, dtype=torch.float32).item()


def check_tensors(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype in DTYPES and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
        assert tensor.shape == tensors[0].shape and tensor.device == tensors[0].device, (tensor.shape, tensor.device)


def check_flat(*tensors: torch.Tensor) -> None:
    check_tensors(*tensors)
    assert tensors[0].dim() == 1, tensors[0].shape


def check_scalars(
    device: torch.device,
    scale: torch.Tensor | None,
    sum_squares: torch.Tensor | None,
    bad: torch.Tensor | None,
    changed: torch.Tensor | None = None,
) -> None:
    dtypes = (torch.float32, torch.float32, torch.int32, torch.int64)
    for tensor, dtype in zip((scale, sum_squares, bad, changed), dtypes, strict=True):
        if tensor is not None:
            assert tensor.dtype == dtype and tensor.numel() == 1 and tensor.device == device, tensor
