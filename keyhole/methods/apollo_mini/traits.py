"""Settings and row of `apollo-mini`."""

from dataclasses import dataclass, replace

from keyhole.limits import BelowOne, Count, Positive
from keyhole.methods.lomo.traits import LOMO, LOMOConfig
from keyhole.methods.traits import Demo


@dataclass(frozen=True, kw_only=True)
class APOLLOMiniConfig(LOMOConfig):
    """APOLLO-Mini: LOMO with Adam's step size for each matrix, from a rank-1 sketch of its gradient. Streams."""

    scale: Positive = 128**0.5
    """Factor of every matrix's step; the paper's for rank 1 is the square root of 128."""
    refresh: Count = 200
    """Steps for which a sketch keeps its random direction."""
    beta1: BelowOne = 0.9
    """Decay of the running mean of the sketch."""
    beta2: BelowOne = 0.999
    """Decay of the running mean of the squared sketch."""
    eps: Positive = 1e-8
    """Added to the root of the second moment before dividing."""


APOLLO_MINI = replace(
    LOMO,
    name="apollo-mini",
    cls="keyhole.methods.apollo_mini.method:APOLLOMini",
    settings=APOLLOMiniConfig,
    learning_rate=2e-5,
    sane_rates=(1e-7, 1e-2),
    exchanged=lambda width: 3.0,  # pieces in 16 bits, their sums in 32
    steps=1.1,
    demo=Demo(lr=2e-3),
)
