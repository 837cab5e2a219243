"""Numbers that change from step to step, on the device, where CUDA graphs (model/backward/recorded.py) read them.

Also flags that the device computes during a step. They are copied on the compute stream, and the host reads them when
they have arrived, without waiting for the whole step.
"""

from typing import Any

import torch

from keyhole.machine.gpu import accelerator


class StepNumbers:
    """The rate, the step (for random bits) and a decay of moments."""

    def __init__(self, device: torch.device) -> None:
        self.lr, self.beta = (torch.zeros((), device=device) for _ in range(2))
        self.step = torch.zeros((), dtype=torch.int32, device=device)

    def set(self, lr: float, step: int, beta: float = 0.0) -> None:
        """Sets them for the launches that follow."""
        self.lr.fill_(lr)
        self.beta.fill_(beta)
        self.step.fill_(step if step < 2**31 else step - 2**32)


class Flags:
    """Boolean flags on their way from the device to the host."""

    def __init__(self, *flags: torch.Tensor) -> None:
        together = torch.stack([flag.to(torch.int32) for flag in flags])
        self.event: Any = None
        if together.is_cuda:
            together = torch.empty(len(flags), dtype=torch.int32, pin_memory=True).copy_(together, non_blocking=True)
            self.event = accelerator.Event()
            self.event.record()
        self.flags = together

    def read(self) -> list[bool]:
        """Waits only for the kernels launched before the flags."""
        if self.event is not None:
            self.event.synchronize()
        return [bool(flag) for flag in self.flags]

    @property
    def arrived(self) -> bool:
        return self.event is None or self.event.query()
