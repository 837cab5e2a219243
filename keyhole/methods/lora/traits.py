"""Settings and row of `lora`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from keyhole.limits import BelowOne, Positive, Rank
from keyhole.methods.traits import FROZEN_WIRES, Demo, Fault, RunSettings, Traits, host_activations


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """LoRA, by peft: the model is frozen, low-rank matrices beside its linear layers are trained by AdamW. Streams."""

    r: Rank = 8
    """Rank of the adapters; at most the smaller side of the largest matrix that gets one."""
    alpha: Positive = 16.0
    """Adapters are scaled by alpha / r."""
    dropout: BelowOne = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    target_modules: str | list[str] | None = None
    """Names of the linear layers to adapt, such as [q_proj, v_proj]; null = all linear layers of the blocks."""
    activations: Literal["none", "block", "host", "auto"] = "auto"
    """Kept for backward: everything (none), block inputs (block), these in host memory (host), or what fits (auto)."""
    merge: bool = True
    """Save the model with its adapters merged; false = the original model, and the adapters in adapter/."""


def _faults(own: LoRAConfig, run: RunSettings) -> Iterator[Fault]:
    if run.placement == "stream" and own.activations == "none":
        yield "lora.activations", "none needs all weights on the device; use auto, block or host, or resident"


LORA = Traits(
    name="lora",
    cls="keyhole.methods.lora.method:LoRA",
    settings=LoRAConfig,
    learning_rate=2e-4,
    sane_rates=(1e-5, 5e-3),
    sweep="reverse",
    ranks="replicas",
    exchanged=lambda width: 0.0,  # of adapters alone
    device_bytes="keyhole.methods.lora.memory:device_bytes",
    step_work="keyhole.methods.lora.memory:step_work",
    wires=("fp32", "bf16", "fp16"),
    frozen_wires=lambda own: FROZEN_WIRES,
    keeps_base=True,
    by_expert=lambda own: True,
    faults=_faults,
    advice=host_activations,
    demo=Demo(lr=1e-2),
)
