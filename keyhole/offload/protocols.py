"""Who else has to do with the homes of pages (engine.py), and what the engine asks or tells them.

A *gate* rewrites homes on the host (methods/adam_offload/exchange.py): prefetch stops at a page that is not ready, without waiting, and
acquire waits for it. A *watch* must see homes as they are now while work goes on (checkpoint/snapshot/snapshot.py): it is told
before a home is changed, may hold the host up until it has what it needs, and is told again after.
"""

from typing import Protocol

import torch


class Gate(Protocol):
    """Who rewrites homes on the host."""

    def ready(self, page: int) -> bool:
        """Whether the home holds the page's weights; never waits."""

    def wait(self, page: int) -> None:
        """Returns when it does. Kernels that are launched afterwards on the compute stream may read the home."""

    def drain(self) -> None:
        """The same for all pages, and for the host."""

    def close(self) -> None:
        """Ends the work; nobody will ask for a page again."""


class Watch(Protocol):
    """Who wants to know when homes change."""

    def before_change(self, page: int) -> None:
        """Work that will change the home is about to be queued. May wait."""

    def waits_for(self, page: int) -> bool:
        """Whether the next change of the home is what it is here for: a page that could stay away must come."""

    def changed(self, page: int, stream: "torch.cuda.Stream | None") -> None:
        """That work has been queued on this stream (None: it is done)."""
