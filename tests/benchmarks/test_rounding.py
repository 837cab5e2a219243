"""benchmarks/rounding.py, shortened: what rounding does to small first-order steps on the demo task."""

import pytest

from benchmarks import rounding

STEPS, LR = 6, 2e-4


@pytest.mark.matrix
def test_lomo_in_bf16_follows_fp32_unless_rounded_to_nearest() -> None:
    """Stochastic rounding and Kahan lose at most a quarter of what fp32 learns, nearest loses at least three."""
    runs = rounding.SETTINGS["lomo"]["runs"]
    made = {how: rounding.run("lomo", *how, STEPS, LR, STEPS) for how in runs.values()}
    learned = {how: result["losses"][0] - result["losses"][-1] for how, result in made.items()}
    fp32 = learned["fp32", "nearest"]
    assert fp32 > 0.05
    assert learned["bf16", "nearest"] < 0.25 * fp32
    for how in ("stochastic", "kahan"):
        assert abs(learned["bf16", how] - fp32) < 0.25 * fp32
    changed = {how: result["changed"] for how, result in made.items()}
    assert 0 < changed["bf16", "nearest"] < changed["bf16", "stochastic"] < changed["fp32", "nearest"] <= 1
