"""Settings and row of `apollo-mini`."""

from dataclasses import dataclass, replace

from keyhole.limits import Count, Positive, setting
from keyhole.methods.lomo.traits import LOMO, LOMOSettings
from keyhole.methods.settings import AdamSettings


@dataclass(frozen=True, kw_only=True)
class APOLLOMiniConfig(AdamSettings, LOMOSettings):
    """APOLLO-Mini: LOMO with Adam's step size for each matrix, from a rank-1 sketch of its gradient. Streams."""

    # fmt: off
    scale: Positive = setting(128**0.5,
        "Factor of every matrix's step; the paper's for rank 1 is the square root of 128.")
    refresh: Count = setting(200, "Steps for which a sketch keeps its random direction.")
    # fmt: on


APOLLO_MINI = replace(
    LOMO,
    name="apollo-mini",
    cls="keyhole.methods.apollo_mini.method:APOLLOMini",
    settings=APOLLOMiniConfig,
    formulas="keyhole.methods.apollo_mini.memory:FORMULAS",
    learning_rate=1e-4,  # its step is about sqrt(128 / m) of an AdamW step at the same rate, for a shorter side m
    sane_rates=(1e-7, 1e-2),
)
