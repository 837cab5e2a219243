"""Disables a caller's autocast, no_grad and inference mode inside keyhole, and lets one thread compute at a time.

torch.autocast casts the inputs of products. A model computes entirely in the dtype that it was loaded with: steps,
evaluation and generation run with autocast off, and restore it when they return. A step computes gradients and keeps
tensors for later ones, so it runs as outside of the caller's no_grad and inference mode.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from keyhole.machine.held import alone

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


@contextmanager
def computing() -> Iterator[None]:
    """A context, or a decorator, for a step, an evaluation or a generation."""
    with alone(), without_autocast():
        yield


@contextmanager
def with_gradients() -> Iterator[None]:
    """A context in which gradients are on, and tensors are ordinary ones."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.enable_grad():
            yield
    else:
        with torch.enable_grad():
            yield
