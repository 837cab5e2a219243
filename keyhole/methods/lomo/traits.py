"""Settings and rows of `lomo`, `adalomo` and `lomo-lora`, which share one reverse sweep."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from keyhole.limits import Fraction, Positive, Rank
from keyhole.methods.traits import Demo, Fault, RunSettings, Traits, host_activations


@dataclass(frozen=True, kw_only=True)
class LOMOConfig:
    """LOMO: gradient descent with the update inside the backward pass; no gradient is kept. Streams."""

    rounding: Literal["stochastic", "nearest", "kahan"] = "stochastic"
    """Rounding of updated weights to 16 bits; kahan keeps the rounding error, 2 bytes per parameter (resident only)."""
    activations: Literal["none", "block", "host", "auto"] = "block"
    """Kept for backward: everything (none), block inputs (block), these in host memory (host), or what fits (auto)."""
    clip_value: Positive | None = None
    """Bound on the absolute value of each element of the gradient; null = no bound."""
    clip_group_norm: Positive | None = None
    """Bound on the norm of each tensor's gradient; null = no bound. For the whole gradient: max_grad_norm."""
    grad_norm: bool = True
    """Measure the norm of the gradient; false: the product adds float32 or nearest updates directly to the weight."""
    fused: bool = True
    """Compute the gradients of linear layers in one buffer, or directly in the weight; false = torch's own backward."""
    compile: bool = False
    """Run blocks through torch.compile: faster, after a minute; for constant shapes (packing). Rounds differently."""


@dataclass(frozen=True, kw_only=True)
class AdaLOMOConfig(LOMOConfig):
    """AdaLOMO: LOMO with a step size for every weight, from a second moment kept by rows and columns. Streams."""


@dataclass(frozen=True, kw_only=True)
class LOMOLoRAConfig(LOMOConfig):
    """LoRA + LOMO: the model by LOMO, low-rank adapters beside it (by peft) by AdamW. Streams."""

    adapter_lr: Positive = 2e-4
    """Peak rate of the adapters; follows the schedule of learning_rate."""
    adapter_warmup_ratio: Fraction | None = None
    """Share of the steps over which the adapters' rate warms up; null = warmup_ratio."""
    r: Rank = 8
    """Rank of the adapters; at most the smaller side of the largest matrix that gets one."""
    alpha: Positive = 16.0
    """Adapters are scaled by alpha / r."""
    target_modules: str | list[str] | None = None
    """Names of the linear layers to adapt, such as [q_proj, v_proj]; null = all linear layers of the blocks."""


def _faults(section: str, own: LOMOConfig, run: RunSettings) -> Iterator[Fault]:
    clips = {"max_grad_norm": run.max_grad_norm, f"{section}.clip_value": own.clip_value}
    clips[f"{section}.clip_group_norm"] = own.clip_group_norm
    asked = [key for key, value in clips.items() if value is not None]
    if len(asked) > 1:
        yield asked[1], f"contradicts {asked[0]}: gradients are clipped in one way; set one of them to null"
    if run.placement == "stream" and own.activations == "none":
        yield f"{section}.activations", "none needs all weights on the device; use block or host, or resident"
    if run.placement == "stream" and own.rounding == "kahan":
        yield f"{section}.rounding", "kahan is for weights on the device; use stochastic, or wire=fp32"


def _lora_faults(own: LOMOLoRAConfig, run: RunSettings) -> Iterator[Fault]:
    yield from _faults("lomo_lora", own, run)
    if own.compile:
        yield "lomo_lora.compile", "compiled blocks cannot have adapters; set it to false, or method=lomo"


_ALIKE: dict[str, Any] = {
    "sweep": "reverse",
    "device_bytes": "keyhole.methods.memory:reverse_bytes",
    "step_work": "keyhole.methods.lomo.memory:step_work",
    "wires": ("fp32", "bf16", "fp16"),
    "underflow_safe": True,
    "by_expert": lambda own: not own.compile,
    "advice": host_activations,
}
LOMO = Traits(
    name="lomo",
    cls="keyhole.methods.lomo.method:LOMO",
    settings=LOMOConfig,
    learning_rate=5e-3,
    sane_rates=(1e-5, 1e-1),
    announces="pages",
    ranks="shards",
    steps=1.5,
    faults=lambda own, run: _faults("lomo", own, run),
    demo=Demo(lr=0.05),
    **_ALIKE,
)
ADALOMO = Traits(
    name="adalomo",
    cls="keyhole.methods.lomo.adalomo:AdaLOMO",
    settings=AdaLOMOConfig,
    learning_rate=5e-4,
    sane_rates=(1e-5, 5e-3),
    announces="pages",
    ranks="shards",
    steps=1.1,
    faults=lambda own, run: _faults("adalomo", own, run),
    demo=Demo(lr=1e-2),
    **_ALIKE,
)
LOMO_LORA = Traits(
    name="lomo-lora",
    cls="keyhole.methods.lomo.lomo_lora:LOMOLoRA",
    settings=LOMOLoRAConfig,
    learning_rate=5e-3,
    sane_rates=(1e-5, 1e-1),
    ranks="shards",
    steps=1.2,
    faults=_lora_faults,
    demo=Demo(lr=0.02, options={"adapter_lr": 1e-3}),
    **(_ALIKE | {"device_bytes": "keyhole.methods.lomo.memory:device_bytes"}),
)
