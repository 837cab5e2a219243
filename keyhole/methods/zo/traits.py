"""Settings and row of `zo`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from keyhole.limits import BelowOne, Count, Limit, Positive
from keyhole.methods.traits import AUTO_RATE, FROZEN_WIRES, Advice, Demo, Fault, RunSettings, Traits
from keyhole.methods.zo.defaults import BOUNDED_RATE, DEFAULTS, FOLD_ERROR, FOLD_PERIODS, SEARCH_STEPS
from keyhole.methods.zo.rounded_run import USUAL_STEPS, refusal


@dataclass(frozen=True, kw_only=True)
class ZOConfig:
    """Zeroth-order (MeZO and others): the gradient is estimated from losses near the weights, forward passes only."""

    estimator: Literal["mezo", "fzoo", "grzo", "meazo"] = "mezo"
    """From losses to an update (docs/methods.md): pairs; one-sided; pairs on parts of the rows; scaled pairs."""
    eps: Annotated[float, Limit(1e-8, 1.0)] | None = None
    """Size of the perturbation: losses are evaluated at w + eps z and w - eps z (fzoo: not the latter); null = 1e-3."""
    directions: Annotated[int, Limit(1, 4096)] | None = None
    """Number of random directions z per step: two passes each (fzoo: one; grzo: two on its part of the rows); null = mezo 1, fzoo 7, grzo 4, meazo 1."""  # noqa: E501
    distribution: Literal["gaussian", "rademacher"] | None = None
    """Distribution of z: N(0, 1), or -1 and +1 with equal probability; null = gaussian (fzoo: rademacher)."""
    beta: BelowOne = 0.99
    """meazo: share of the second moment that is kept from step to step."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Rounding of updated weights to 16 bits (nearest loses most small updates); float32 needs none."""
    clip: Positive | None = None
    """Bound on the absolute value of each projected gradient; null = no bound."""
    deferred_update: bool = True
    """Apply a step's update at the next visit of the weights: one pass over them less; same results."""
    write_back_every: Count | None = None
    """Steps between two write-backs of a streamed block (same results); null = 4 while the GPU waits for the link, else 1."""  # noqa: E501
    compile: bool = False
    """Run blocks through torch.compile: faster if the GPU is the bottleneck; streams whole blocks. Other rounding."""
    fp8_steps: Count = USUAL_STEPS
    """wire: fp8: maximum number of steps of a run; updates are rounded to 8 bits, which adds noise that grows with the steps (docs/methods.md)."""  # noqa: E501
    rank: Annotated[int, Limit(1, 256)] | None = None
    """Rank of low-rank directions in the linear layers of blocks (LOZO): z = U V^T / sqrt(rank), trained as factors; weights are read once per step for all passes, and not written within a period; needs a lower learning_rate, rank / (rank + 1) of a dense one or less; null = full rank."""  # noqa: E501
    refresh: Count = 50
    """zo.rank: number of steps of a period, for which V is kept (U is drawn every step)."""
    fold: bool = True
    """zo.rank: merge the factors into the weights at the end of each period; false = keep the factors of every period, so that weights never change."""  # noqa: E501
    fold_periods: Count | None = FOLD_PERIODS
    """zo.fold=false: number of periods after which all kept factors are compressed into one low-rank sum beside the weights; null = never."""  # noqa: E501
    fold_error: BelowOne = FOLD_ERROR
    """zo.fold=false: maximum error of all such compressions together, relative to the Frobenius norm of a matrix's sum; as many terms are kept as that needs."""  # noqa: E501
    guide: Count | None = None
    """zo.rank: number of rows from whose errors, by forward passes, V is found at the start of each period (docs/methods.md); null = V is random."""  # noqa: E501
    merge: bool = True
    """zo.fold=false: save the model with all factors merged; false = the factors in adapter/, in peft's format, beside a model that holds the rest (trained embedding, head and norms too): load both."""  # noqa: E501


def filled(own: ZOConfig) -> ZOConfig:
    """The settings with the estimator's defaults where they are null."""
    usual = DEFAULTS[own.estimator]
    names = [name for name in ("eps", "directions", "distribution") if getattr(own, name) is None]
    return replace(own, **{name: getattr(usual, name) for name in names})


def directions(own: ZOConfig) -> int:
    """The number of directions."""
    return own.directions or DEFAULTS[own.estimator].directions


def _passes(own: ZOConfig) -> int:
    return DEFAULTS[own.estimator].passes(directions(own))


def _forwards(own: ZOConfig) -> float:
    return 2 if DEFAULTS[own.estimator].splits else _passes(own)


def _forwards_ahead(own: ZOConfig, rows: int, all_rows: int) -> tuple[float, int]:
    """Passes over the rows that V of a period is found from: two (the second is not always necessary)."""
    return (0.0, 1) if own.guide is None else (2 * min(own.guide, all_rows) / rows, own.refresh)


def _usual_rates(own: ZOConfig) -> tuple[float, tuple[float, float]]:
    usual = DEFAULTS[own.estimator]
    low, high = usual.sane_rates
    bounded = own.clip is not None or own.guide is not None
    return usual.learning_rate, (low, max(high, BOUNDED_RATE) if bounded else high)


def _advice(own: ZOConfig) -> Advice:
    lower = ("directions",) if directions(own) > DEFAULTS[own.estimator].least else ()
    return Advice(lower, (f"refresh={10 * own.refresh}",) if _keeps_factors(own) else ())  # fewer periods are kept


def _faults(own: ZOConfig, run: RunSettings) -> Iterator[Fault]:
    usual, now = DEFAULTS[own.estimator], directions(own)
    if now < usual.least:
        yield "zo.directions", f"found {now}; {own.estimator} needs {usual.least} at least, to know a spread"
    if own.clip is not None and not usual.clips:
        yield "zo.clip", f"has no meaning with zo.estimator={own.estimator}, which scales by a spread; set zo.clip=null"
    yield from _low_rank_faults(own, run)
    if run.wire == "fp8" and not _keeps_factors(own) and (run.max_steps or 0) > own.fp8_steps:
        yield "wire", refusal(run.max_steps or 0, own.fp8_steps)
    if run.max_grad_norm is not None:
        yield "max_grad_norm", "zo has no gradient to clip; set max_grad_norm=null and use zo.clip"


def _idle(own: ZOConfig, run: RunSettings) -> Iterator[Fault]:
    usual = ZOConfig()
    if own.beta != usual.beta and own.estimator != "meazo":
        yield "zo.beta", f"zo.estimator is {own.estimator} (meazo reads it)"
    if own.refresh != usual.refresh and own.rank is None:
        yield "zo.refresh", "zo.rank is not set"
    if own.fp8_steps != usual.fp8_steps and run.wire != "fp8":
        yield "zo.fp8_steps", "wire is not fp8"


def _keeps_factors(own: ZOConfig) -> bool:
    return own.rank is not None and not own.fold


def _low_rank_faults(own: ZOConfig, run: RunSettings) -> Iterator[Fault]:
    if not own.merge and not _keeps_factors(own):
        yield "zo.merge", "false needs factors that are kept; set zo.rank and zo.fold=false, or zo.merge=true"
    for key, usual in {"fold_periods": FOLD_PERIODS, "fold_error": FOLD_ERROR}.items():
        if getattr(own, key) != usual and not _keeps_factors(own):
            yield f"zo.{key}", "is about factors that are kept; set zo.rank and zo.fold=false, or leave it out"
    if own.rank is None:
        if own.guide is not None:
            yield "zo.guide", "finds directions of low rank; set zo.rank=1 (or more), or zo.guide=null"
        if not own.fold:
            yield "zo.fold", "has no meaning without zo.rank; set zo.rank, or zo.fold=true"
        return
    if own.guide is not None and run.learning_rate == AUTO_RATE:
        yield "learning_rate", "auto searches along random directions; with zo.guide set a number, or zo.guide=null"
    if own.compile:
        yield "zo.compile", "does not go with zo.rank, whose layers have a product of their own; set zo.compile=false"
    if run.weight_decay:
        yield "weight_decay", "zo.rank leaves the weights alone within a period, so they cannot decay; set it to 0"
    if own.fold and run.wire == "fp8":
        yield "wire", "fp8 weights are not rounded anew by zo.rank; set zo.fold=false, or another wire"


ZO = Traits(
    name="zo",
    cls="keyhole.methods.zo.method:ZO",
    settings=ZOConfig,
    learning_rate=DEFAULTS["mezo"].learning_rate,
    sane_rates=DEFAULTS["mezo"].sane_rates,
    sweep="forward",
    device_bytes="keyhole.methods.zo.memory:device_bytes",
    step_work="keyhole.methods.zo.work:step_work",
    steps=20.0,  # MeZO trains 20,000 steps, first-order fine-tuning 600 to 1,000
    wires=("fp32", "bf16", "fp16", "fp8"),
    frozen_wires=lambda own: FROZEN_WIRES if _keeps_factors(own) else (),
    frozen_by="zo.rank=2 zo.fold=false",
    underflow_safe=True,
    journaled=True,
    announces="pages",
    ranks="replicas",
    may_change=("clip", "deferred_update", "write_back_every", "fp8_steps", "merge"),
    passes=_passes,
    usual_rates=_usual_rates,
    forwards=_forwards,
    forwards_ahead=_forwards_ahead,
    search_steps=SEARCH_STEPS,
    search_passes=3,
    fill=filled,
    light=_keeps_factors,
    whole_blocks=lambda own: own.compile,
    by_expert=lambda own: not own.compile,
    advice=_advice,
    faults=_faults,
    idle=_idle,
    demo=Demo(steps=300, lr=1.5e-3, batch_size=32),
)
