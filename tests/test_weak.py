"""Callbacks that hold nothing."""

import gc
import weakref

from keyhole.weak import weakly


class Owner:
    def double(self, number: int) -> int:
        return 2 * number


def test_it_calls_while_the_owner_lives_and_keeps_it_not_alive() -> None:
    """The method's answer first, None when its owner is gone."""
    owner = Owner()
    call, gone = weakly(owner.double), weakref.ref(owner)
    assert call(21) == 42
    del owner
    gc.collect()
    assert gone() is None and call(21) is None
