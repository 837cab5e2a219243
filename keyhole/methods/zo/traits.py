"""Settings and row of `zo`. Imports no torch.

The rate of `mezo` multiplies a projected gradient, whose size depends on the model. The rate of `fzoo` multiplies a
number of size one: it is the change of a weight per step, and similar for most models.

fp8_steps. An update u is far below the spacing d of E4M3 at a weight (d is 1/16 to 1/8 of it), so stochastic rounding
leaves most weights unchanged and moves a few by a full d. The mean is right, but variance accumulates over T steps:

    noise after T steps = T d E|u|        as a share of the energy w^2:  about 0.07 T E|u| / |w|

For |u| of 1e-6 on weights of 0.02 that is 1 % of the weights' energy after 4,000 steps (bf16, with a spacing 16 times
smaller: 0.06 %). It is proportional to rate x steps, like what a run learns, so a lower rate over more steps does not
help. Measured on SmolLM2-135M and SST-2 (5e-6, batches of 16): 6 to 8 points of accuracy below fp32 and bf16 after
2,000 steps, 19 after 4,000. Weights that are never written have no such noise: zo.rank with zo.fold=false.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from keyhole.limits import Count, Limit, Positive, setting
from keyhole.methods.settings import FROZEN_WIRES, Around, Fault, MethodSettings, Rates, python
from keyhole.methods.traits import Traits

BOUNDED_RATE = 3e-4  # the highest that worked with zo.clip or zo.guide, on some layers of a small model
USUAL_STEPS = 1000  # of a run in fp8


@dataclass(frozen=True)
class Defaults:
    """Defaults of an estimator, for settings that are null."""

    learning_rate: float
    sane_rates: tuple[float, float]
    directions: int = 1
    eps: float = 1e-3
    distribution: str = "gaussian"
    one_sided: bool = False  # each direction costs one pass, plus one unperturbed pass; else two
    clips: bool = True  # zo.clip has an effect
    least: int = 1  # minimum number of directions

    def passes(self, directions: int) -> int:
        """Forward passes in lockstep, per micro-batch."""
        return directions + 1 if self.one_sided else 2 * directions

    def pairs(self, directions: int) -> int:
        """Pairs of perturbed copies."""
        return directions // 2 + 1 if self.one_sided else directions


DEFAULTS = {
    "mezo": Defaults(1e-6, (1e-8, 4e-5)),
    "fzoo": Defaults(1e-4, (1e-6, 5e-3), directions=7, distribution="rademacher", one_sided=True, clips=False, least=2),
}


@dataclass(frozen=True, kw_only=True)
class ZOConfig(MethodSettings):
    """Zeroth-order (MeZO and others): the gradient is estimated from losses near the weights, forward passes only."""

    gone = {"merge": "a saved model has all factors merged; leave it out"}
    # fmt: off
    estimator: Literal["mezo", "fzoo"] = setting("mezo",
        "From losses to an update (docs/methods.md): pairs; or one-sided, scaled by the spread of losses.")
    eps: Annotated[float, Limit(1e-8, 1.0)] | None = setting(None,
        "Size of the perturbation: losses are evaluated at w + eps z and w - eps z (fzoo: not the latter); null = "
        "1e-3.")
    directions: Annotated[int, Limit(1, 4096)] | None = setting(None,
        "Number of random directions z per step: two passes each (fzoo: one); null = mezo 1, fzoo 7.")
    distribution: Literal["gaussian", "rademacher"] | None = setting(None,
        "Distribution of z: N(0, 1), or -1 and +1 with equal probability; null = gaussian (fzoo: rademacher).")
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    clip: Positive | None = setting(None, "Bound on the absolute value of each projected gradient; null = no bound.")
    deferred_update: bool = python(True,
        "Apply a step's update at the next visit of the weights: one pass over them less; same results.")
    write_back_every: Count | None = python(None,
        "Steps between two write-backs of a streamed block (same results); null = 4 while the GPU waits for the "
        "link, else 1.")
    compile: bool | str = False
    fp8_steps: Count = setting(USUAL_STEPS,
        "wire: fp8: maximum number of steps of a run; updates are rounded to 8 bits, which adds noise that grows with "
        "the steps (docs/methods.md).")
    rank: Annotated[int, Limit(1, 256)] | None = setting(None,
        "Rank of low-rank directions in the linear layers of blocks (LOZO): z = U V^T / sqrt(rank), trained as "
        "factors; weights are read once per step for all passes, and not written within a period; needs a lower "
        "learning_rate, rank / (rank + 1) of a dense one or less; null = full rank.")
    refresh: Count = setting(50, "zo.rank: number of steps of a period, for which V is kept (U is drawn every step).")
    fold: bool = setting(True,
        "zo.rank: merge the factors into the weights at the end of each period; false = keep the factors of every "
        "period, so that weights never change.")
    guide: Count | None = setting(None,
        "zo.rank: number of rows from whose errors, by forward passes, V is found at the start of each period "
        "(docs/methods.md); null = V is random.")
    # fmt: on

    @property
    def usual(self) -> Defaults:
        """What the estimator's settings stand for where they are null."""
        return DEFAULTS[self.estimator]

    @property
    def count(self) -> int:
        """The number of directions."""
        return self.directions or self.usual.directions

    @property
    def passes(self) -> int:
        return self.usual.passes(self.count)

    @property
    def light(self) -> bool:
        return self.rank is not None and not self.fold

    @property
    def whole_blocks(self) -> bool:
        return bool(self.compile)

    @property
    def by_expert(self) -> bool:
        return not self.compile

    @property
    def frozen_wires(self) -> tuple[str, ...]:
        return FROZEN_WIRES if self.light else ()

    @property
    def advice(self) -> tuple[str, ...]:
        fewer = ("zo.directions=1",) if self.count > self.usual.least else ()
        return (*fewer, f"zo.refresh={10 * self.refresh}") if self.light else fewer  # of kept periods

    def filled(self) -> "ZOConfig":
        names = [name for name in ("eps", "directions", "distribution") if vars(self)[name] is None]
        return replace(self, **{name: vars(self.usual)[name] for name in names})

    def rates(self, usual: Rates) -> Rates:
        low, high = self.usual.sane_rates
        bounded = self.clip is not None or self.guide is not None
        return self.usual.learning_rate, (low, max(high, BOUNDED_RATE) if bounded else high)

    def faults(self, around: Around) -> Iterator[Fault]:
        usual, low, fp8, steps = self.usual, self.rank is not None, around.wire == "fp8", around.max_steps or 0
        rules = (
            (self.count < usual.least, "zo.directions",
             f"found {self.count}; {self.estimator} needs {usual.least} at least, to know a spread"),
            (self.clip is not None and not usual.clips, "zo.clip",
             f"has no meaning with zo.estimator={self.estimator}, which scales by a spread; leave it out"),
            (not low and self.guide is not None, "zo.guide",
             "finds directions of low rank; set zo.rank=1 (or more), or zo.guide=null"),
            (not low and not self.fold, "zo.fold", "has no meaning without zo.rank; set zo.rank, or zo.fold=true"),
            (low and self.compile, "compile",
             "does not go with zo.rank, whose layers have a product of their own; set compile=false"),
            (low and self.weight_decay, "weight_decay",
             "zo.rank leaves the weights alone within a period, so they cannot decay; set it to 0"),
            (low and self.fold and fp8, "wire", "fp8 weights are not rounded anew by zo.rank; set zo.fold=false, or "
             "another wire"),
            (fp8 and not self.light and steps > self.fp8_steps, "wire", self.refusal(steps)),
            (self.max_grad_norm is not None, "max_grad_norm", "zo has no gradient to clip; set max_grad_norm=null and "
             "use zo.clip"),
        )  # fmt: skip
        yield from ((key, why) for is_wrong, key, why in rules if is_wrong)

    def refusal(self, steps: int) -> str:
        """The error message for a run of `steps` steps in fp8, which are more than fp8_steps."""
        return (
            f"fp8 rounds every update to 8 bits, and {steps:,} steps are more than zo.fp8_steps={self.fp8_steps:,}: "
            "the noise adds up and can undo what is learned (SmolLM2-135M: 6 to 8 points of accuracy after 2,000 steps "
            "of 5e-6; docs/methods.md). Set wire=bf16, or learn beside weights that stay as they are (zo.rank=2 "
            f"zo.fold=false), or accept it with zo.fp8_steps={steps}"
        )

    def idle(self, around: Around) -> Iterator[Fault]:
        if self.refresh != ZOConfig.refresh and self.rank is None:
            yield "zo.refresh", "zo.rank is not set"
        if self.fp8_steps != ZOConfig.fp8_steps and around.wire != "fp8":
            yield "zo.fp8_steps", "wire is not fp8"


ZO = Traits(
    name="zo",
    cls="keyhole.methods.zo.method:ZO",
    settings=ZOConfig,
    formulas="keyhole.methods.zo.memory:FORMULAS",
    learning_rate=DEFAULTS["mezo"].learning_rate,
    sane_rates=DEFAULTS["mezo"].sane_rates,
    sweep="forward",
    steps=20.0,
    evidence="MeZO trains 20,000 steps where fine-tuning takes 600 to 1,000",
    wires=("fp32", "bf16", "fp16", "fp8"),
    frozen_by="zo.rank=2 zo.fold=false",
    underflow_safe=True,
    journaled=True,
    announces="pages",
    ranks="replicas",
    may_change=("clip", "fp8_steps"),
)
