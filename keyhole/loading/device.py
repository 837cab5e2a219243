"""Chooses the device."""

import torch

from keyhole.errors import UserError


def choose_device(device: str | torch.device | None) -> torch.device:
    """The requested device, or the first GPU, or the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device: {device!r} is not a device; use cpu, cuda or cuda:0") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError("device: cuda was asked for, but PyTorch sees no CUDA GPU here; use device=cpu")
        index = device.index or 0
        if index >= torch.cuda.device_count():
            raise UserError(f"device: cuda:{index} was asked for, but there are {torch.cuda.device_count()} GPUs")
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise UserError(f"device: {device} is not supported; use cpu, cuda or cuda:0")
    return device
