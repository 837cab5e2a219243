"""Zeroth-order fine-tuning (MeZO and others), forward passes only.

method.py     the method: one step            passes.py       its sweep: units are updated, perturbed and used
closure.py    a step for any loss             update.py       the update, applied at a unit's next visit
estimators/   from losses to coefficients     looks.py        the perturbed points of a step, and their rows
parts.py      the rows of a step, in parts    rate_search.py  learning_rate: auto
write_back.py when a unit is written back     spans.py        ranges of a unit that are updated alike
low_rank/     directions of low rank          recorded_step.py   the passes as one CUDA graph
memory.py     bytes                           work.py         FLOPs and launches
traits.py     settings and row                defaults.py     of the estimators
rounded_run.py   how many steps 8-bit weights may be updated
"""
