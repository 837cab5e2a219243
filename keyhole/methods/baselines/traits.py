"""Settings and rows of the baselines: `adamw`, `sgd`, `galore`."""

from dataclasses import dataclass
from typing import Literal

from keyhole.limits import BelowOne, Count, Positive
from keyhole.methods.traits import Demo, Traits


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW, torch's own: two moments per parameter, decoupled weight decay."""

    beta1: BelowOne = 0.9
    """Decay of the running mean of the gradient."""
    beta2: BelowOne = 0.999
    """Decay of the running mean of the squared gradient."""
    eps: Positive = 1e-8
    """Added to the root of the second moment before dividing."""


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Stochastic gradient descent, torch's own."""

    momentum: BelowOne = 0.0
    """Share of the last update that is kept; 0 needs no state."""


@dataclass(frozen=True, kw_only=True)
class GaLoreConfig:
    """GaLore: Adam on gradients projected to a low rank by SVD; plain AdamW for all other tensors."""

    rank: Count = 128
    """Rank of the projection; a matrix is projected if its shorter side is larger than this."""
    update_proj_gap: Count = 200
    """Steps between two SVDs."""
    scale: Positive = 0.25
    """Factor of the update of projected matrices."""
    activations: Literal["none", "block"] = "none"
    """What the forward pass keeps: everything, or only the inputs of blocks, which are recomputed (less memory)."""


ADAMW = Traits(
    name="adamw",
    cls="keyhole.methods.baselines.first_order:AdamW",
    settings=AdamWConfig,
    learning_rate=2e-5,
    sane_rates=(1e-7, 5e-4),
    sweep="torch",
    ranks="replicas",
    exchanged=lambda width: 3.0,  # pieces in 16 bits, their sums in 32
    device_bytes="keyhole.methods.baselines.memory:device_bytes",
    step_work="keyhole.methods.baselines.memory:step_work",
    announces="step",
)
SGD = Traits(
    name="sgd",
    cls="keyhole.methods.baselines.first_order:SGD",
    settings=SGDConfig,
    learning_rate=5e-3,
    sane_rates=(1e-5, 1e-1),
    steps=1.5,
    sweep="torch",
    ranks="replicas",
    exchanged=lambda width: 3.0,  # pieces in 16 bits, their sums in 32
    device_bytes="keyhole.methods.baselines.memory:device_bytes",
    step_work="keyhole.methods.baselines.memory:step_work",
    announces="step",
    demo=Demo(lr=0.05),
)
GALORE = Traits(
    name="galore",
    cls="keyhole.methods.baselines.galore:GaLore",
    settings=GaLoreConfig,
    learning_rate=1e-4,
    sane_rates=(1e-6, 1e-2),
    steps=1.2,
    sweep="torch",
    ranks="replicas",
    exchanged=lambda width: 3.0,  # pieces in 16 bits, their sums in 32
    device_bytes="keyhole.methods.baselines.memory:device_bytes",
    step_work="keyhole.methods.baselines.memory:step_work",
    demo=Demo(lr=2e-3, options={"rank": 16, "update_proj_gap": 50, "scale": 1.0}),
)
