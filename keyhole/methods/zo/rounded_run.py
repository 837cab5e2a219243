"""How many steps 8-bit weights may be updated without explicit consent. Imports no torch.

An update u is far below the spacing d of E4M3 at a weight (d is 1/16 to 1/8 of it), so stochastic rounding leaves most
weights unchanged and moves a few by a full d. The mean is right, but variance accumulates over T steps:

    noise after T steps = T d E|u|        as a share of the energy w^2:  about 0.07 T E|u| / |w|

For |u| of 1e-6 on weights of 0.02 that is 1 % of the weights' energy after 4,000 steps, 5 % after 20,000 (bf16, with a
spacing 16 times smaller: 0.3 %). It is proportional to rate x steps, like what a run learns, so a lower rate over more
steps does not help.

Its effect was measured on SmolLM2-135M and SST-2 (5e-6, batches of 16, where an update is about
3e-5): 2.2 % of the energy and 6 to 8 points of accuracy below fp32 and bf16 after 2,000 steps, 19 after 4,000, and a
loss of 19 instead of 7 after 6,000. So a run that is longer than USUAL_STEPS must set zo.fp8_steps.

Weights that are never written have no such noise: zo.rank with zo.fold=false trains factors beside them.
"""

USUAL_STEPS = 1000


def refusal(steps: int, most: int) -> str:
    """The error message for a run of `steps` steps, which are more than `most`."""
    return (
        f"fp8 rounds every update to 8 bits, and {steps:,} steps are more than zo.fp8_steps={most:,}: the noise adds "
        "up and can undo what is learned (SmolLM2-135M: 6 to 8 points of accuracy after 2,000 steps of 5e-6; "
        "docs/methods.md). Set wire=bf16, or learn "
        f"beside weights that stay as they are (zo.rank=2 zo.fold=false), or accept it with zo.fp8_steps={steps}"
    )
