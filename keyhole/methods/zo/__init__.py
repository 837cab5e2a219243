"""Zeroth-order fine-tuning (MeZO and others), forward passes only.

A step: settle, then for every unit perturb, run, perturb, run; at the end one scalar a direction, and the update is
what the next step's visit applies. From the bottom up; a file imports only from files above it:

    traits.py         settings, defaults of the estimators, and row
    estimators.py     the perturbed points of a step, and from their losses to coefficients
    write_back.py     when a unit is written back
    update.py         the update, applied at a unit's next visit
    directions.py     directions of full size, the sweep of a step, and any loss at every look (closures)
    low_rank/         directions of low rank
    recorded_step.py  the passes as one CUDA graph
    method.py         the method: one step

memory.py has the bytes, FLOPs and launches of a step, for plans.
"""
