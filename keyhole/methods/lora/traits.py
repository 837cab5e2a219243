"""Settings and row of `lora`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from keyhole.limits import BelowOne, Positive, Rank, setting
from keyhole.methods.settings import FROZEN_WIRES, Around, Fault, MethodSettings
from keyhole.methods.traits import Traits


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(MethodSettings):
    """LoRA, by peft: the model is frozen, low-rank matrices beside its linear layers are trained by AdamW. Streams."""

    # fmt: off
    r: Rank = setting(8, "Rank of the adapters; at most the smaller side of the largest matrix that gets one.")
    alpha: Positive = setting(16.0, "Adapters are scaled by alpha / r.")
    dropout: BelowOne = setting(0.0, "Share of an adapter's inputs that is dropped in training.")
    target_modules: str | list[str] | None = setting(None,
        "Names of the linear layers to adapt, such as [q_proj, v_proj]; null = all linear layers of the blocks.")
    activations: Literal["none", "block", "host", "auto"] = "auto"
    merge: bool = setting(True,
        "Save the model with its adapters merged; false = the original model, and the adapters in adapter/.")
    # fmt: on

    @property
    def by_expert(self) -> bool:
        return True

    @property
    def frozen_wires(self) -> tuple[str, ...]:
        return FROZEN_WIRES

    def faults(self, around: Around) -> Iterator[Fault]:
        if around.placement == "stream" and self.activations == "none":
            yield "activations", "none needs all weights on the device; use auto, block or host, or placement=resident"


LORA = Traits(
    name="lora",
    cls="keyhole.methods.lora.method:LoRA",
    settings=LoRAConfig,
    formulas="keyhole.methods.lora.memory:FORMULAS",
    learning_rate=2e-4,
    sane_rates=(1e-5, 5e-3),
    sweep="reverse",
    wires=("fp32", "bf16", "fp16"),
    ranks="replicas",
    keeps_base=True,
)
