"""Disables a caller's autocast inside keyhole.

torch.autocast casts the inputs of products, in the thread that entered it. The passes of a step run in threads of their
own (model/forward/lockstep.py), so a caller's autocast would affect the head and not the blocks. A model computes
entirely in the dtype that it was loaded with: steps, evaluation and generation run with autocast off, and restore it
when they return.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DEVICES = ("cpu", "cuda")


@contextmanager
def without_autocast() -> Iterator[None]:
    """A context, or a decorator of a function, in which autocast is off in this thread."""
    on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    for device in on:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)
