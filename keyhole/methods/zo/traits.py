"""Settings and row of `zo`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from keyhole.limits import BelowOne, Count, Limit, Positive
from keyhole.methods.settings import FROZEN_WIRES, Advice, Around, Fault, MethodSettings, Rates, python
from keyhole.methods.traits import Traits
from keyhole.methods.zo.defaults import BOUNDED_RATE, DEFAULTS, FOLD_ERROR, FOLD_PERIODS, SEARCH_STEPS, Defaults
from keyhole.methods.zo.rounded_run import USUAL_STEPS, refusal


@dataclass(frozen=True, kw_only=True)
class ZOConfig(MethodSettings):
    """Zeroth-order (MeZO and others): the gradient is estimated from losses near the weights, forward passes only."""

    estimator: Literal["mezo", "fzoo", "grzo", "meazo"] = "mezo"
    """From losses to an update (docs/methods.md): pairs; one-sided; pairs on parts of the rows; scaled pairs."""
    eps: Annotated[float, Limit(1e-8, 1.0)] | None = None
    """Size of the perturbation: losses are evaluated at w + eps z and w - eps z (fzoo: not the latter); null = 1e-3."""
    directions: Annotated[int, Limit(1, 4096)] | None = None
    """Number of random directions z per step: two passes each (fzoo: one; grzo: two on its part of the rows); null = mezo 1, fzoo 7, grzo 4, meazo 1."""  # noqa: E501
    distribution: Literal["gaussian", "rademacher"] | None = None
    """Distribution of z: N(0, 1), or -1 and +1 with equal probability; null = gaussian (fzoo: rademacher)."""
    beta: BelowOne = python(0.99)
    """meazo: share of the second moment that is kept from step to step."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    clip: Positive | None = None
    """Bound on the absolute value of each projected gradient; null = no bound."""
    deferred_update: bool = python(True)
    """Apply a step's update at the next visit of the weights: one pass over them less; same results."""
    write_back_every: Count | None = python(None)
    """Steps between two write-backs of a streamed block (same results); null = 4 while the GPU waits for the link, else 1."""  # noqa: E501
    compile: bool | str = False
    fp8_steps: Count = USUAL_STEPS
    """wire: fp8: maximum number of steps of a run; updates are rounded to 8 bits, which adds noise that grows with the steps (docs/methods.md)."""  # noqa: E501
    rank: Annotated[int, Limit(1, 256)] | None = None
    """Rank of low-rank directions in the linear layers of blocks (LOZO): z = U V^T / sqrt(rank), trained as factors; weights are read once per step for all passes, and not written within a period; needs a lower learning_rate, rank / (rank + 1) of a dense one or less; null = full rank."""  # noqa: E501
    refresh: Count = 50
    """zo.rank: number of steps of a period, for which V is kept (U is drawn every step)."""
    fold: bool = True
    """zo.rank: merge the factors into the weights at the end of each period; false = keep the factors of every period, so that weights never change."""  # noqa: E501
    fold_periods: Count | None = python(FOLD_PERIODS)
    """zo.fold=false: number of periods after which all kept factors are compressed into one low-rank sum beside the weights; null = never."""  # noqa: E501
    fold_error: BelowOne = python(FOLD_ERROR)
    """zo.fold=false: maximum error of all such compressions together, relative to the Frobenius norm of a matrix's sum; as many terms are kept as that needs."""  # noqa: E501
    guide: Count | None = None
    """zo.rank: number of rows from whose errors, by forward passes, V is found at the start of each period (docs/methods.md); null = V is random."""  # noqa: E501
    merge: bool = True
    """zo.fold=false: save the model with all factors merged; false = the factors in adapter/, in peft's format, beside a model that holds the rest (trained embedding, head and norms too): load both."""  # noqa: E501

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
    def forwards(self) -> float | None:
        return 2 if self.usual.splits else self.passes

    def forwards_ahead(self, rows: int, all_rows: int) -> tuple[float, int]:
        """Passes over the rows that V of a period is found from: two (the second is not always necessary)."""
        return (0.0, 1) if self.guide is None else (2 * min(self.guide, all_rows) / rows, self.refresh)

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
    def advice(self) -> Advice:
        lower = ("zo.directions",) if self.count > self.usual.least else ()
        return Advice(lower, (f"zo.refresh={10 * self.refresh}",) if self.light else ())  # fewer periods are kept

    def filled(self) -> "ZOConfig":
        names = [name for name in ("eps", "directions", "distribution") if vars(self)[name] is None]
        return replace(self, **{name: vars(self.usual)[name] for name in names})

    def rates(self, usual: Rates) -> Rates:
        low, high = self.usual.sane_rates
        bounded = self.clip is not None or self.guide is not None
        return self.usual.learning_rate, (low, max(high, BOUNDED_RATE) if bounded else high)

    def faults(self, around: Around) -> Iterator[Fault]:
        usual, now = self.usual, self.count
        if now < usual.least:
            yield "zo.directions", f"found {now}; {self.estimator} needs {usual.least} at least, to know a spread"
        if self.clip is not None and not usual.clips:
            yield (
                "zo.clip",
                f"has no meaning with zo.estimator={self.estimator}, which scales by a spread; leave it out",
            )
        if not self.merge and not self.light:
            yield "zo.merge", "false needs factors that are kept; set zo.rank and zo.fold=false, or zo.merge=true"
        if self.rank is None:
            yield from self._full_rank_faults()
        else:
            yield from self._low_rank_faults(around)
        if around.wire == "fp8" and not self.light and (around.max_steps or 0) > self.fp8_steps:
            yield "wire", refusal(around.max_steps or 0, self.fp8_steps)
        if self.max_grad_norm is not None:
            yield "max_grad_norm", "zo has no gradient to clip; set max_grad_norm=null and use zo.clip"

    def _full_rank_faults(self) -> Iterator[Fault]:
        if self.guide is not None:
            yield "zo.guide", "finds directions of low rank; set zo.rank=1 (or more), or zo.guide=null"
        if not self.fold:
            yield "zo.fold", "has no meaning without zo.rank; set zo.rank, or zo.fold=true"

    def _low_rank_faults(self, around: Around) -> Iterator[Fault]:
        if self.guide is not None and around.searches:
            yield "learning_rate", "auto searches along random directions; with zo.guide set a number, or zo.guide=null"
        if self.compile:
            yield "compile", "does not go with zo.rank, whose layers have a product of their own; set compile=false"
        if self.weight_decay:
            yield "weight_decay", "zo.rank leaves the weights alone within a period, so they cannot decay; set it to 0"
        if self.fold and around.wire == "fp8":
            yield "wire", "fp8 weights are not rounded anew by zo.rank; set zo.fold=false, or another wire"

    def idle(self, around: Around) -> Iterator[Fault]:
        if self.refresh != ZOConfig.refresh and self.rank is None:
            yield "zo.refresh", "zo.rank is not set"
        if self.fp8_steps != ZOConfig.fp8_steps and around.wire != "fp8":
            yield "zo.fp8_steps", "wire is not fp8"


ZO = Traits(
    name="zo",
    cls="keyhole.methods.zo.method:ZO",
    settings=ZOConfig,
    formulas="keyhole.methods.zo.work:FORMULAS",
    learning_rate=DEFAULTS["mezo"].learning_rate,
    sane_rates=DEFAULTS["mezo"].sane_rates,
    sweep="forward",
    steps=20.0,  # MeZO trains 20,000 steps, first-order fine-tuning 600 to 1,000
    wires=("fp32", "bf16", "fp16", "fp8"),
    frozen_by="zo.rank=2 zo.fold=false",
    underflow_safe=True,
    journaled=True,
    announces="pages",
    ranks="replicas",
    may_change=("clip", "fp8_steps", "merge"),
    search_steps=SEARCH_STEPS,
    search_passes=3,
)
