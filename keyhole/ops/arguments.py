"""What the ops that change weights ask of their arguments.

Weights and gradients are contiguous, of one shape and device, in float32, bfloat16 or float16. Numbers that a kernel
reads or adds to (scale, sums, flags) are one-element tensors on the same device, so that nothing waits for the host.
Numbers that change from step to step (rate, step) may be there too: a recorded launch then serves all steps.
A caller that breaks this has a bug, so these are asserts, not errors for users. noise/index.py checks indices.
"""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Scalar = torch.Tensor | None  # one number on the device of the weights, or none
Number = float | torch.Tensor  # float32: by value, or as one number on the device of the weights
Count = int | torch.Tensor  # the same for int32
VECTOR = 8  # alignment, in elements, that lets the compiler widen memory accesses


def float32(value: float) -> float:
    """The nearest float32, so that reference and kernel start from the same number."""
    return torch.tensor(value, dtype=torch.float32).item()


def number(value: Number) -> Number:
    """A value as the nearest float32; one on the device as it is."""
    return value if isinstance(value, torch.Tensor) else float32(value)


def is_on_device(*numbers: Number | Count) -> bool:
    """Whether numbers are on the device: all of them, or none."""
    there = {isinstance(value, torch.Tensor) for value in numbers}
    assert len(there) == 1, numbers
    return there.pop()


def check_tensors(*tensors: torch.Tensor) -> None:
    """Asserts that all have a supported dtype, are contiguous, and share shape and device."""
    for tensor in tensors:
        assert tensor.dtype in DTYPES and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
        assert tensor.shape == tensors[0].shape and tensor.device == tensors[0].device, (tensor.shape, tensor.device)


def check_flat(*tensors: torch.Tensor) -> None:
    """The same, of one dimension."""
    check_tensors(*tensors)
    assert tensors[0].dim() == 1, tensors[0].shape


def check_scalars(device: torch.device, dtype: torch.dtype, *scalars: Scalar) -> None:
    """Asserts that all that are not None are one number of this dtype on this device."""
    for scalar in scalars:
        assert scalar is None or (scalar.dtype == dtype and scalar.numel() == 1 and scalar.device == device), scalar
