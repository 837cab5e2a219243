"""Directions of low rank for zeroth-order steps: Z = U V^T / sqrt(r), U drawn every step, V kept for a period (LOZO).

parts.py     which tensors of the blocks have factors, and where these lie
factors.py   the factors themselves: perturbed, updated, folded into the weights or kept
kept.py      earlier periods beside frozen weights, folded into a sum in fewer terms
passes.py    one pass for all looks of a step over the weights of a unit
saved.py     a checkpoint as a model
state.py     factors in checkpoints, in the journal's replay, and in a model that is saved
"""
