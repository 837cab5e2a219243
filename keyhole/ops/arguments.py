"""Requirements of the ops that change weights on their arguments.

Weights and gradients are contiguous, of one shape and device, in float32, bfloat16 or float16. Numbers that a kernel
reads or adds to (scale, sums, flags) are one-element tensors on the same device, so that the host never waits. Numbers
that change from step to step (rate, step) may be tensors on the device too: then one CUDA graph serves all steps.
A caller that violates this has a bug, so these are asserts, not errors for users. noise/words.py checks indices.
"""

from ctypes import c_float

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Scalar = torch.Tensor | None  # one number on the device of the weights, or none
Number = float | torch.Tensor  # float32: a value, or a one-element tensor on the device of the weights
Count = int | torch.Tensor  # the same for int32
VECTOR = 8  # alignment, in elements, that lets the compiler widen memory accesses


def float32(value: float) -> float:
    """The nearest float32, so that reference and kernel start from the same number."""
    return c_float(value).value


def number(value: Number) -> Number:
    """A value as the nearest float32; a tensor unchanged."""
    return value if isinstance(value, torch.Tensor) else float32(value)


def is_on_device(*numbers: Number | Count) -> bool:
    """Whether numbers are tensors on the device: all of them, or none."""
    there = {isinstance(value, torch.Tensor) for value in numbers}
    assert len(there) == 1, numbers
    return there.pop()


def check_tensors(*tensors: torch.Tensor) -> None:
    """Asserts that all have a supported dtype, are contiguous, and share shape and device."""
    for tensor in tensors:
        assert tensor.dtype in DTYPES and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
        assert tensor.shape == tensors[0].shape and tensor.device == tensors[0].device, (tensor.shape, tensor.device)


def check_flat(*tensors: torch.Tensor) -> None:
    """The same, for one-dimensional tensors."""
    check_tensors(*tensors)
    assert tensors[0].dim() == 1, tensors[0].shape


def check_scalars(device: torch.device, dtype: torch.dtype, *scalars: Scalar) -> None:
    """Asserts that all scalars that are not None have one element of this dtype on this device."""
    for scalar in scalars:
        assert scalar is None or (scalar.dtype == dtype and scalar.numel() == 1 and scalar.device == device), scalar
