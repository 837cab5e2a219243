"""Other readers and writers of the homes of pages (engine.py), and the calls between them and the engine.

A *gate* rewrites homes on the host (methods/adam_offload/exchange.py). Prefetch stops, without waiting, at a page that
is not ready; acquire waits for the page. A *watch* needs the homes as they were at one moment while training goes on
(checkpoint/snapshot.py): the engine calls it before a home changes, where it may block the host until it has
what it needs, and again afterwards.
"""

from typing import Protocol

import torch


class Gate(Protocol):
    """Rewrites homes on the host, and notifies the engine's watch (engine.before_change, engine.changed)."""

    def ready(self, page: int) -> bool:
        """Whether the home holds the page's current weights. Never waits."""

    def wait(self, page: int) -> None:
        """Blocks until it does. Kernels launched afterwards on the compute stream may read the home."""

    def drain(self) -> None:
        """Blocks until all homes hold their current weights, for kernels and for the host."""

    def close(self) -> None:
        """Ends the work; the engine asks for no page afterwards."""


class Watch(Protocol):
    """Is notified when homes change."""

    def before_change(self, page: int) -> None:
        """Work that changes the home is about to be enqueued. May block."""

    def waits_for(self, page: int) -> bool:
        """Whether the home still lacks the change that the watch needs: the page must go home at its next use."""

    def changed(self, page: int, stream: "torch.cuda.Stream | None") -> None:
        """That work was enqueued on this stream (None: it is complete)."""
