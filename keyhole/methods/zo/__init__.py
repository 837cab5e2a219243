"""Zeroth-order fine-tuning (MeZO and others), forward passes only.

From the bottom up; a file imports only from files above it:

    traits.py         settings and row                    defaults.py      of the estimators
    rounded_run.py    how many steps 8-bit weights may be updated
    arguments.py      the settings of ops, in typed parts
    estimators/       from losses to coefficients         parts.py         the rows of a step, in parts
    looks.py          the perturbed points of a step, and their rows
    spans.py          ranges of a unit updated alike      write_back.py    when a unit is written back
    update.py         the update, applied at a unit's next visit
    rate_search.py    learning_rate: auto                 low_rank/        directions of low rank
    perturbed.py      the weights at the looks of a step
    passes.py         one sweep: units are updated, perturbed and used by all passes of a step
    closure.py        any loss, at every look             recorded_step.py the passes as one CUDA graph
    method.py         the method: one step

memory.py has the bytes and work.py the FLOPs and launches of a step, for plans.
"""
