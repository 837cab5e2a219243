"""Settings and row of `adam-offload`."""

from dataclasses import dataclass
from typing import Literal

from keyhole.limits import Threads, setting
from keyhole.methods.settings import AdamSettings
from keyhole.methods.traits import Traits


@dataclass(frozen=True, kw_only=True)
class AdamOffloadConfig(AdamSettings):
    """AdamW, exact, with fp32 weights and moments in host memory (14 bytes per parameter), updated by CPU and GPU."""

    gone = {"schedule": "updates run layer by layer; leave it out"}

    threads: Threads | None = None
    # fmt: off
    gpu_updates: bool | None = setting(None,
        "The GPU also updates a part of the parameters, whose state is copied over the link; same bits. null = if "
        "there is a GPU.")
    activations: Literal["block", "host", "none", "auto"] = "auto"
    compile: bool | str = False
    # fmt: on


ADAM_OFFLOAD = Traits(
    name="adam-offload",
    cls="keyhole.methods.adam_offload.method:AdamOffload",
    settings=AdamOffloadConfig,
    formulas="keyhole.methods.adam_offload.memory:FORMULAS",
    learning_rate=2e-5,
    sane_rates=(1e-7, 5e-4),
    sweep="reverse",
    ranks="shards",
    may_change=("gpu_updates",),
)
