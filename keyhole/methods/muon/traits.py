"""Settings and row of `muon`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from keyhole.limits import BelowOne, Count, Positive, setting
from keyhole.methods.lomo.traits import LOMO, LOMOSettings
from keyhole.methods.settings import AdamSettings, Around, Fault


@dataclass(frozen=True, kw_only=True)
class MuonConfig(AdamSettings, LOMOSettings):
    """Muon: orthogonalised momentum for matrices, AdamW for the rest; 16-bit state in host memory. Streams."""

    # fmt: off
    momentum: BelowOne = setting(0.95, "Decay of the running mean of a matrix's gradients.")
    nesterov: bool = setting(True, "Orthogonalise the momentum mixed with the gradient once more.")
    ns_coefficients: list[float] | None = setting(None,
        "The three coefficients of a Newton-Schulz step; null = 3.4445, -4.775, 2.0315.")
    ns_steps: Count = setting(5, "Newton-Schulz steps.")
    ns_eps: Positive = setting(1e-7, "Least norm by which a matrix is divided before them (torch.optim.Muon's eps).")
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = setting("match_rms_adamw",
        "Scale of a matrix's step: AdamW's (match_rms_adamw), so that one rate serves all, or Muon's own (original).")
    moments: Literal["bfloat16", "float32"] = setting("bfloat16",
        "Format of momentum and moments, rounded stochastically: 2 or 4 bytes per parameter of host memory.")
    # fmt: on

    def faults(self, around: Around) -> Iterator[Fault]:
        yield from super().faults(around)
        if self.ns_coefficients is not None and len(self.ns_coefficients) != 3:
            yield "muon.ns_coefficients", f"there are {len(self.ns_coefficients)}; give three, or leave it out"
        if self.rounding == "kahan":
            yield "rounding", "kahan keeps its compensation on the device; with muon use stochastic"


MUON = replace(
    LOMO,
    name="muon",
    cls="keyhole.methods.muon.method:Muon",
    settings=MuonConfig,
    formulas="keyhole.methods.muon.memory:FORMULAS",
    learning_rate=2e-5,
    sane_rates=(1e-7, 1e-2),
    underflow_safe=False,
    may_change=("moments",),
)
