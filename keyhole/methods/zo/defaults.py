"""Names and defaults of the estimators, for code that reads settings; imports no torch.

The rate of `mezo` and `grzo` multiplies a projected gradient, whose size depends on the model. The rate of `fzoo` and
`meazo` multiplies a number of size one: it is the change of a weight per step, and similar for most models.
"""

from dataclasses import dataclass

SEARCH_STEPS = 24  # of learning_rate: auto
FOLD_PERIODS, FOLD_ERROR = 32, 0.1  # zo.fold=false
BOUNDED_RATE = 3e-4  # the highest that worked with zo.clip or zo.guide, on some layers of a small model


@dataclass(frozen=True)
class Defaults:
    """Defaults of an estimator, for settings that are null."""

    learning_rate: float
    sane_rates: tuple[float, float]
    directions: int = 1
    eps: float = 1e-3
    distribution: str = "gaussian"
    one_sided: bool = False  # each direction costs one pass, plus one unperturbed pass; else two
    splits: bool = False  # directions share the rows of a step
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
    "grzo": Defaults(1e-6, (1e-8, 1e-4), directions=4, splits=True),
    "meazo": Defaults(3e-5, (1e-6, 2e-3)),
}
