"""Who else writes or reads the homes of pages (engine.py), and what the engine asks or tells them.

A *gate* rewrites homes on the host (methods/adam_offload/exchange.py): prefetch stops, without waiting, at a page that
is not ready, and acquire waits for it. A *watch* must see homes as they are now while training goes on
(checkpoint/snapshot/snapshot.py): it is told before a home is changed, may hold the host up until it has what it needs,
and is told again afterwards.
"""

from typing import Protocol

import torch


class Gate(Protocol):
    """Rewrites homes on the host, and tells the engine's watch (engine.before_change, engine.changed)."""

    def ready(self, page: int) -> bool:
        """Whether the home holds the page's weights. Never waits."""

    def wait(self, page: int) -> None:
        """Returns when it does. Kernels that are launched afterwards on the compute stream may read the home."""

    def drain(self) -> None:
        """Returns when all homes hold their weights, for kernels and for the host."""

    def close(self) -> None:
        """Ends the work; no page will be asked for again."""


class Watch(Protocol):
    """Is told when homes change."""

    def before_change(self, page: int) -> None:
        """Work that will change the home is about to be queued. May wait."""

    def waits_for(self, page: int) -> bool:
        """Whether the home still lacks the change that the watch is here for: the page must go home at its next use."""

    def changed(self, page: int, stream: "torch.cuda.Stream | None") -> None:
        """That work has been queued on this stream (None: it is done)."""
