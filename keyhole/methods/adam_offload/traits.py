"""Settings and row of `adam-offload`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from keyhole.limits import Threads, setting
from keyhole.methods.settings import AdamSettings, Around, Fault, python
from keyhole.methods.traits import Traits


@dataclass(frozen=True, kw_only=True)
class AdamOffloadConfig(AdamSettings):
    """AdamW, exact, with fp32 weights and moments in host memory (14 bytes per parameter), updated by CPU and GPU."""

    # Update layer by layer while the GPU computes, or between two steps as ZeRO-Offload (baseline); same results.
    schedule: Literal["layerwise", "monolithic"] = python("layerwise")
    threads: Threads | None = None
    # fmt: off
    gpu_updates: bool | None = setting(None,
        "The GPU also updates a part of the parameters, whose state is copied over the link; same bits. null = if "
        "there is a GPU.")
    activations: Literal["block", "host", "none", "auto"] = "block"
    compile: bool | str = False
    # fmt: on

    def faults(self, around: Around) -> Iterator[Fault]:
        if self.gpu_updates and self.schedule != "layerwise":
            yield "adam_offload.gpu_updates", "the GPU helps in schedule=layerwise only; leave it at null"


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
