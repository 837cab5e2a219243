"""Settings and row of `adam-offload`."""

from dataclasses import dataclass
from typing import Literal

from keyhole.limits import BelowOne, Positive, Threads
from keyhole.methods.traits import Traits, host_activations


@dataclass(frozen=True, kw_only=True)
class AdamOffloadConfig:
    """AdamW, exact, with fp32 weights and moments in host memory (14 bytes per parameter), updated by CPU and GPU."""

    beta1: BelowOne = 0.9
    """Decay of the running mean of the gradient."""
    beta2: BelowOne = 0.999
    """Decay of the running mean of the squared gradient."""
    eps: Positive = 1e-8
    """Added to the root of the second moment before dividing."""
    schedule: Literal["layerwise", "monolithic"] = "layerwise"
    """Update layer by layer while the GPU computes, or between two steps as ZeRO-Offload (baseline); same results."""
    threads: Threads | None = None
    """CPU threads of the updates; null = all cores but one, or but two if the GPU updates too."""
    gpu_updates: bool | None = None
    """The GPU also updates a part of the parameters, whose state is copied over the link; same bits. null = if there is a GPU and schedule is layerwise."""  # noqa: E501
    activations: Literal["block", "host", "none", "auto"] = "block"
    """Kept for backward: block inputs (block), these in host memory (host), everything (none), or what fits (auto)."""
    compile: bool = False
    """Run blocks through torch.compile: faster, after a minute; for constant shapes (packing). Rounds differently."""


ADAM_OFFLOAD = Traits(
    name="adam-offload",
    cls="keyhole.methods.adam_offload.method:AdamOffload",
    settings=AdamOffloadConfig,
    learning_rate=2e-5,
    sane_rates=(1e-7, 5e-4),
    sweep="reverse",
    device_bytes="keyhole.methods.adam_offload.memory:device_bytes",
    step_work="keyhole.methods.adam_offload.memory:step_work",
    host_check="keyhole.methods.adam_offload.memory:check_host_state",
    ranks="shards",
    through_host=(3.0, 26.0),  # gradients in 16 bits, masters in 32; state read and written
    may_change=("schedule", "threads", "gpu_updates"),
    advice=host_activations,
)
