"""Settings and row of `zo`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from keyhole.limits import Count, Limit, Positive
from keyhole.methods.base import Advice, Demo, Fault, RunSettings, Traits


@dataclass(frozen=True, kw_only=True)
class ZOConfig:
    """Zeroth-order (MeZO): the gradient is estimated from loss differences, forward passes only."""

    eps: Positive = 1e-3
    """Size of the perturbation: losses are measured at w + eps z and w - eps z."""
    directions: Annotated[int, Limit(1, 4096)] = 1
    """Number of random directions z per step; each costs two forward passes, their estimates are averaged."""
    distribution: Literal["gaussian", "rademacher"] = "gaussian"
    """What z is drawn from: N(0, 1), or -1 and +1 with equal chance."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How updated weights go back to 16 bits (nearest loses most small steps); float32 needs none."""
    clip: Positive | None = None
    """Bound on the absolute value of each projected gradient; null = no bound."""
    deferred_update: bool = True
    """Apply a step's update when the weights are next visited: one pass over them less; same results."""
    write_back_every: Count | None = None
    """Steps between two write-backs of a streamed block (same results); null = 4 while the GPU waits for the link, else 1."""  # noqa: E501
    compile: bool = False
    """Run blocks through torch.compile: faster where the GPU is the bound; streams whole blocks. Rounds differently."""


def _faults(own: ZOConfig, run: RunSettings) -> Iterator[Fault]:
    if run.max_grad_norm is not None:
        yield "max_grad_norm", "zo has no gradient to clip; set max_grad_norm=null and use zo.clip"


ZO = Traits(
    name="zo",
    cls="keyhole.methods.zo.method:ZO",
    settings=ZOConfig,
    learning_rate=1e-6,
    sane_rates=(
        1e-8,
        2e-5,
    ),  # MeZO's grids; a zeroth-order step is noisier than a gradient, so its rate is 20 to 100 times lower
    sweep="forward",
    device_bytes="keyhole.methods.zo.memory:device_bytes",
    wires=("fp32", "bf16", "fp16", "fp8"),
    underflow_safe=True,
    journaled=True,
    announces="pages",
    ranks="replicas",
    may_change=("clip", "deferred_update", "write_back_every"),
    passes=lambda own: 2 * own.directions,
    whole_blocks=lambda own: own.compile,
    advice=lambda own: Advice(lower=("directions",) if own.directions > 1 else ()),
    faults=_faults,
    demo=Demo(steps=300, lr=1.5e-3, batch_size=32),
)
