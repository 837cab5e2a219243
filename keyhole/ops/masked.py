"""Memory accesses of kernels: with a mask at the ends of a tensor, without one inside of it, where they are wider."""

from keyhole.ops.backend import jit, tl


@jit()
def load(ptr, mask, MASKED: tl.constexpr):
    """Loads; 0 outside of the mask."""
    if MASKED:
        x = tl.load(ptr, mask, other=0)
    else:
        x = tl.load(ptr)
    return x


@jit()
def store(ptr, x, mask, MASKED: tl.constexpr):
    """Stores within the mask."""
    if MASKED:
        tl.store(ptr, x, mask)
    else:
        tl.store(ptr, x)
