"""From a float32 result to the stored weight.

bits.py draws the random bits of stochastic rounding, for flat tensors and for tiles of a matrix; round.py rounds,
16-bit weights two at a time; store.py is the last step of every update that has a gradient.
"""
