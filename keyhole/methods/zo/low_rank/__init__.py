"""Low-rank directions for zeroth-order steps: Z = U V^T / sqrt(r), U drawn every step, V kept for a period (LOZO).

parts.py             which tensors of the blocks have factors, and where these are stored
factors.py           the factors themselves: perturbed, updated, added to the products of layers
merge.py             from the factors into the weights: at the end of a period, in a save, before another method trains
guide.py             V from passes over some rows, instead of random numbers
head_errors.py       the error at the head, of a language model or a classifier
error_directions.py  which V that is: what in the inputs of a layer predicts the error at the head
direction_files.py   the V that were found, as files beside a journal
kept.py              factors of earlier periods beside frozen weights, compressed to fewer terms
passes.py            one pass over the weights of a unit for all looks of a step
saved.py             a checkpoint as a model
peft_adapter.py      what was learned, as a peft adapter beside the base model
state.py             factors in checkpoints, in the journal's replay, and in a saved model
"""
