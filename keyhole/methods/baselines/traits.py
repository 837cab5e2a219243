"""Settings and rows of the baselines: `adamw`, `sgd`, `galore`."""

from dataclasses import dataclass, replace
from typing import Literal

from keyhole.limits import BelowOne, Count, Positive, setting
from keyhole.methods.settings import AdamSettings, MethodSettings
from keyhole.methods.traits import Traits


@dataclass(frozen=True, kw_only=True)
class BaselineConfig(MethodSettings):
    """Settings of all baselines."""


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(AdamSettings, BaselineConfig):
    """AdamW, torch's own: two moments per parameter, decoupled weight decay."""


@dataclass(frozen=True, kw_only=True)
class SGDConfig(BaselineConfig):
    """Stochastic gradient descent, torch's own."""

    # fmt: off
    momentum: BelowOne = setting(0.0, "Share of the last update that is kept; 0 needs no state.")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class GaLoreConfig(AdamSettings, BaselineConfig):
    """GaLore: Adam on gradients projected to a low rank by SVD; plain AdamW for all other tensors."""

    # fmt: off
    rank: Count = setting(128, "Rank of the projection; a matrix is projected if its shorter side is larger than this.")
    update_proj_gap: Count = setting(200, "Steps between two SVDs.")
    scale: Positive = setting(0.25, "Factor of the update of projected matrices.")
    activations: Literal["auto", "none", "block"] = "auto"
    # fmt: on


ADAMW = Traits(
    name="adamw",
    cls="keyhole.methods.baselines.first_order:AdamW",
    settings=AdamWConfig,
    formulas="keyhole.methods.baselines.memory:FORMULAS",
    learning_rate=2e-5,
    sane_rates=(1e-7, 5e-4),
    sweep="torch",
    ranks="replicas",
    announces="step",
)
SGD = replace(
    ADAMW,
    name="sgd",
    cls="keyhole.methods.baselines.first_order:SGD",
    settings=SGDConfig,
    learning_rate=5e-3,
    sane_rates=(1e-5, 1e-1),
)
GALORE = replace(
    ADAMW,
    name="galore",
    cls="keyhole.methods.baselines.galore:GaLore",
    settings=GaLoreConfig,
    learning_rate=1e-4,
    sane_rates=(1e-6, 1e-2),
    announces="never",
)
