"""Settings and rows of `lomo`, `adalomo` and `lomo-lora`, which share one reverse sweep."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from keyhole.limits import Fraction, Positive, Rank, setting
from keyhole.methods.settings import Around, Fault, MethodSettings, python
from keyhole.methods.traits import Traits


@dataclass(frozen=True, kw_only=True)
class LOMOSettings(MethodSettings):
    """Settings of all methods here, of apollo-mini and of muon."""

    gone = {
        "grad_norm": "the norm is always measured; leave it out",
        "clip_group_norm": "use max_grad_norm, which clips by the norm of the whole gradient",
        "clip_value": "use max_grad_norm, which clips by the norm of the whole gradient",
    }
    rounding: Literal["stochastic", "nearest", "kahan"] = "stochastic"
    activations: Literal["none", "block", "host", "auto"] = "auto"
    compile: bool | str = False
    fused: bool = python(True, "Compute the gradients of linear layers in one buffer; False: torch's own backward.")
    groups: list[dict[str, Any]] | None = python(
        None,
        '[{"match": regular expression, "lr_scale": 0.1, "weight_decay": 0.0}, ..]; the first one that matches a '
        "tensor's name applies to it.",
    )

    @property
    def by_expert(self) -> bool:
        return not self.compile

    def faults(self, around: Around) -> Iterator[Fault]:
        if around.placement == "stream" and self.activations == "none":
            yield "activations", "none needs all weights on the device; use block or host, or placement=resident"
        if around.placement == "stream" and self.rounding == "kahan":
            yield "rounding", "kahan is for weights on the device; use stochastic, or wire=fp32"


@dataclass(frozen=True, kw_only=True)
class LOMOConfig(LOMOSettings):
    """LOMO: gradient descent with the update inside the backward pass; no gradient is kept. Streams."""

    clip_value: Positive | None = python(
        None,
        "Bound on the absolute value of each element of the gradient, in one backward pass; max_grad_norm needs two.",
    )

    def faults(self, around: Around) -> Iterator[Fault]:
        yield from super().faults(around)
        if self.clip_value is not None and self.max_grad_norm is not None:
            yield "clip_value", "contradicts max_grad_norm: gradients are clipped in one way; leave one of them out"


@dataclass(frozen=True, kw_only=True)
class AdaLOMOConfig(LOMOSettings):
    """AdaLOMO: LOMO with a step size for every weight, from a second moment kept by rows and columns. Streams."""


@dataclass(frozen=True, kw_only=True)
class LOMOLoRAConfig(LOMOConfig):
    """LoRA + LOMO: the model by LOMO, low-rank adapters beside it (by peft) by AdamW. Streams."""

    # fmt: off
    adapter_lr: Positive = setting(2e-4, "Peak rate of the adapters; follows the schedule of learning_rate.")
    adapter_warmup_ratio: Fraction | None = setting(None,
        "Share of the steps over which the adapters' rate warms up; null = warmup_ratio.")
    r: Rank = setting(8, "Rank of the adapters; at most the smaller side of the largest matrix that gets one.")
    alpha: Positive = setting(16.0, "Adapters are scaled by alpha / r.")
    target_modules: str | list[str] | None = setting(None,
        "Names of the linear layers to adapt, such as [q_proj, v_proj]; null = all linear layers of the blocks.")
    # fmt: on

    def faults(self, around: Around) -> Iterator[Fault]:
        yield from super().faults(around)
        if self.compile:
            yield "compile", "compiled blocks cannot have the adapters of lomo-lora; set it to false, or method=lomo"


LOMO = Traits(
    name="lomo",
    cls="keyhole.methods.lomo.method:LOMO",
    settings=LOMOConfig,
    formulas="keyhole.methods.lomo.memory:LOMO_FORMULAS",
    learning_rate=5e-3,
    sane_rates=(1e-5, 1e-1),
    sweep="reverse",
    wires=("fp32", "bf16", "fp16"),
    underflow_safe=True,
    announces="pages",
    ranks="shards",
)
ADALOMO = replace(
    LOMO,
    name="adalomo",
    cls="keyhole.methods.lomo.adalomo:AdaLOMO",
    settings=AdaLOMOConfig,
    learning_rate=5e-4,
    sane_rates=(1e-5, 5e-3),
)
LOMO_LORA = replace(
    LOMO,
    name="lomo-lora",
    cls="keyhole.methods.lomo.lomo_lora:LOMOLoRA",
    settings=LOMOLoRAConfig,
    formulas="keyhole.methods.lomo.memory:LOMO_LORA_FORMULAS",
    announces="never",
)
